"""Labels: integers for everything that may be removed, with a union of those removed together, and reasons to
stay."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch
from scipy import sparse
from scipy.sparse.csgraph import connected_components
from torch import Tensor

from critical_neurons.core.structure import Ints

NONE = -1
"""The label of what cannot shrink: inputs, and values computed from units that must stay."""

FILL = -2
"""The label of tensors made from a shape alone, such as zeros to write to; the trial removal tests whether they
shrink with what they are combined with."""


MANY = 2**14
"""More pairs of labels than this are stored without repetitions."""


class Labels:
    """New labels, unions and reasons to stay, collected while a model runs and resolved afterwards."""

    def __init__(self) -> None:
        self.count = 0
        self._pairs: list[Ints] = []
        self._kept: list[tuple[Ints, str]] = []

    def fresh(self, *shape: int) -> Tensor:
        """New labels, all different."""
        size = prod(shape)
        self.count += size
        return torch.arange(self.count - size, self.count, dtype=torch.float64).reshape(shape)

    def unite(self, one: Tensor, other: Tensor) -> None:
        """Unite labels at the same place. For those next to `NONE` the caller gives a reason to stay."""
        ends = np.broadcast_arrays(one.numpy(), other.numpy())
        differ = (ends[0] != ends[1]) & (np.minimum(*ends) >= 0)
        if differ.any():
            pairs = np.stack([each[differ] for each in ends]).astype(np.int64)
            if pairs.size > MANY:
                pairs = np.stack(np.divmod(np.unique(pairs[0] * self.count + pairs[1]), self.count))
            self._pairs.append(pairs)

    def unite_along(self, labels: Tensor, axis: int) -> Tensor:
        """Unite all labels along an axis, which gets size 1."""
        if labels.shape[axis] == 1:
            return labels
        first = labels.amax(axis, keepdim=True)
        self.unite(first, labels)
        return first

    def tie(self, labels: Tensor, axis: int) -> Tensor:
        """Unite all labels along an axis, whose size is kept."""
        return torch.where(labels >= 0, self.unite_along(labels, axis), labels)

    def keep(self, labels: Tensor, reason: str, *, foremost: bool = False) -> None:
        """Labels that must stay; of several reasons the first counts, unless one is `foremost`."""
        numbers = labels.numpy()
        found = np.unique(numbers[numbers >= 0]).astype(np.int64)
        if len(found):
            self._kept.insert(0 if foremost else len(self._kept), (found, reason))

    def are_apart(self, labels: Tensor) -> bool:
        """Whether, as far as known, no class has labels at two indices of the axes before the last."""
        found = self.resolve().find(labels)
        rows = found.reshape(-1, found.shape[-1])
        return sum(len(np.unique(row)) for row in rows) == len(np.unique(found))

    def resolve(self) -> Classes:
        """The classes of united labels, and the first reason to stay of each."""
        ends = np.concatenate(self._pairs, axis=1) if self._pairs else np.zeros((2, 0), dtype=np.int64)
        graph = sparse.coo_array((np.ones(ends.shape[1]), (ends[0], ends[1])), shape=(self.count, self.count))
        count, found = connected_components(graph, directed=False)
        why = np.full(count + 1, -1)  # the last entry is that of NONE
        for place in reversed(range(len(self._kept))):
            why[found[self._kept[place][0]]] = place
        return Classes(np.append(found, NONE).astype(np.int64), why, tuple(reason for _, reason in self._kept))


@dataclass(frozen=True)
class Classes:
    """`of` has the class of every label and a last entry for `NONE`; `why` the index of each class's reason to stay
    in `reasons`, or -1."""

    of: Ints
    why: Ints
    reasons: tuple[str, ...]

    @property
    def count(self) -> int:
        return len(self.why) - 1

    def find(self, labels: Tensor) -> Ints:
        """The class of every label, `NONE` if it must stay."""
        return self._stay[_index(labels)]

    def explain(self, labels: Tensor) -> str:
        """The first reason to stay of any of the labels, if there is one."""
        why = self.why[self.of[_index(labels)]]
        return next((self.reasons[place] for place in why.tolist() if place >= 0), "")

    @cached_property
    def _stay(self) -> Ints:
        return np.where(self.why[self.of] >= 0, NONE, self.of)


def _index(labels: Tensor) -> Ints:
    return np.maximum(labels.numpy().astype(np.int64), NONE)
