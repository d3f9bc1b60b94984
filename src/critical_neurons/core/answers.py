"""Answers: the classes that two networks name for the same inputs, counted class by class, and where they differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from critical_neurons.core.documents import Count
from critical_neurons.core.structure import Ints


@dataclass(frozen=True)
class ClassCount:
    """How many `inputs` have this label, and of how many of them it was named `before` and `after`."""

    label: Count
    inputs: Count
    before: Count
    after: Count


@dataclass(frozen=True)
class Change:
    """An input, by its row, whose class was `before` and is `after`. The right one is its `label`, if it has any."""

    row: Count
    label: Count | None
    before: Count
    after: Count

    @property
    def fate(self) -> Literal["lost", "won", "other"]:
        """Whether the right class is no longer named, is named now, or is named by neither or not known."""
        return "lost" if self.before == self.label else "won" if self.after == self.label else "other"


@dataclass(frozen=True)
class Answers:
    """`classes` in ascending order, none without labels; `changes` in the order of the inputs."""

    classes: tuple[ClassCount, ...]
    changes: tuple[Change, ...]

    @classmethod
    def count(cls, before: Ints, after: Ints, labels: Ints | None) -> Answers:
        """From the class that each network names for every input."""
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
