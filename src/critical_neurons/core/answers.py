"""Answers: the predictions of two networks for the same inputs, counted by class, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from critical_neurons.core.documents import Count
from critical_neurons.core.structure import Ints


@dataclass(frozen=True)
class ClassCount:
    """How many `inputs` have this label, and how many of them were predicted correctly `before` and `after`."""

    label: Count
    inputs: Count
    before: Count
    after: Count


@dataclass(frozen=True)
class Change:
    """An input, by its row, whose predicted class changed, and its `label` if it has one."""

    row: Count
    label: Count | None
    before: Count
    after: Count

    @property
    def fate(self) -> Literal["lost", "won", "other"]:
        """Whether a correct prediction was lost or won, or neither."""
        return "lost" if self.before == self.label else "won" if self.after == self.label else "other"


@dataclass(frozen=True)
class Answers:
    """`classes` in ascending order, none without labels; `changes` in the order of the inputs."""

    classes: tuple[ClassCount, ...]
    changes: tuple[Change, ...]

    @classmethod
    def count(cls, before: Ints, after: Ints, labels: Ints | None) -> Answers:
        """From the predicted classes of both networks."""
        classes = []
        for label in () if labels is None else np.unique(labels).tolist():
            of_class = labels == label
            right = (int((named[of_class] == label).sum()) for named in (before, after))
            classes.append(ClassCount(label, int(of_class.sum()), *right))
        changes = [
            Change(row, None if labels is None else int(labels[row]), int(before[row]), int(after[row]))
            for row in np.flatnonzero(before != after).tolist()
        ]
        return cls(tuple(classes), tuple(changes))
