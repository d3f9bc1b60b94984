"""Labels: whole numbers that stand for what may be removed, which of them are one, and which must stay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from critical_neurons.core.structure import Ints

NONE = -1
"""The label of what cannot shrink: inputs, and what is computed from units that must stay."""

FILL = -2
"""The label of what a forward makes out of a shape alone, as zeros to write to: whether it shrinks along with what it
meets is for the trial removal to tell."""


class Labels:
    """Fresh labels, unions of them and reasons to stay; gathered while a model runs, resolved afterwards."""

    def __init__(self) -> None:
        self.count = 0
        self._pairs: list[Ints] = []
        self._kept: list[tuple[Ints, str]] = []

    def fresh(self, *shape: int) -> Tensor:
        """New labels, all different."""
        size = int(np.prod(shape))
        self.count += size
        return torch.arange(self.count - size, self.count, dtype=torch.float64).reshape(shape)

    def unite(self, one: Tensor, other: Tensor) -> None:
        """Labels at the same place are one. Beside `NONE` a label stays; whoever calls says why."""
        one, other = torch.broadcast_tensors(one, other)  # type: ignore[no-untyped-call]
        differ = (one != other) & (one >= 0) & (other >= 0)
        if bool(differ.any()):
            pairs = torch.stack([one[differ], other[differ]]).numpy().astype(np.int64)
            key = pairs[0] * self.count + pairs[1]
            self._pairs.append(np.stack(np.divmod(np.unique(key), self.count)))

    def unite_along(self, labels: Tensor, axis: int) -> Tensor:
        """All labels along an axis are one: the first, in an axis of size 1."""
        first = labels.amax(axis, keepdim=True)
        self.unite(first, labels)
        return first

    def tie(self, labels: Tensor, axis: int) -> Tensor:
        """All labels along an axis are one, at all the places where there were any."""
        return torch.where(labels >= 0, self.unite_along(labels, axis), labels)

    def keep(self, labels: Tensor, reason: str, *, foremost: bool = False) -> None:
        """They must stay; of several reasons the first counts, unless one is foremost."""
        found = np.unique(labels[labels >= 0].numpy().astype(np.int64))
        if len(found):
            self._kept.insert(0 if foremost else len(self._kept), (found, reason))

    def are_apart(self, labels: Tensor) -> bool:
        """Whether no class has labels at two places of the other axes than the last, as far as is known yet."""
        found = self.resolve().find(labels)
        rows = found.reshape(-1, found.shape[-1])
        return sum(len(np.unique(row)) for row in rows) == len(np.unique(found))

    def resolve(self) -> Classes:
        """One class for all labels that became one, and the first reason to stay of each."""
        ends = np.concatenate(self._pairs, axis=1) if self._pairs else np.zeros((2, 0), dtype=np.int64)
        graph = sparse.coo_array((np.ones(ends.shape[1]), (ends[0], ends[1])), shape=(self.count, self.count))
        count, found = connected_components(graph, directed=False)
        why = np.full(count + 1, -1)  # the last answers for NONE
        for place in reversed(range(len(self._kept))):
            why[found[self._kept[place][0]]] = place
        return Classes(np.append(found, NONE).astype(np.int64), why, tuple(reason for _, reason in self._kept))


@dataclass(frozen=True)
class Classes:
    """`of` has the class of every label and a last entry for `NONE`; `why` which one of the `reasons` a class has to
    stay, -1 where there is none."""

    of: Ints
    why: Ints
    reasons: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.why) - 1

    def find(self, labels: Tensor) -> Ints:
        """The class behind every label, `NONE` where it must stay."""
        return self._stay[_index(labels)]

    def explain(self, labels: Tensor) -> str:
        """The first reason that any of them has to stay; nothing where there is none."""
        why = self.why[self.of[_index(labels)]]
        return next((self.reasons[place] for place in why.tolist() if place >= 0), "")

    @cached_property
    def _stay(self) -> Ints:
        return np.where(self.why[self.of] >= 0, NONE, self.of)


def _index(labels: Tensor) -> Ints:
    return np.maximum(labels.numpy().astype(np.int64), NONE)
