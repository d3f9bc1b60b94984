"""Choices of data: which images a search is given, how many of them, and whether all at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from critical_neurons.cli.options import MOST_PER_CLASS

CLASSES = 10
SIZES = (10, 100, 300, 1000, 3000)

Kind: TypeAlias = Literal["even", "any", "correct", "unsure", "sure"]


@dataclass(frozen=True)
class Choice:
    """So many images from the training part, as many of every class unless `any`. The network is sure where the
    largest of its outputs is far above the second. `by_class`: one search per class, scores averaged."""

    images: int = 1000
    kind: Kind = "even"
    by_class: bool = False

    @property
    def name(self) -> str:
        return f"images-{self.images}/{self.kind}/{'by-class' if self.by_class else 'at-once'}"


@dataclass(frozen=True)
class Question:
    """Choices that differ in one thing, by what they are called, and which of them is the default."""

    title: str
    answers: Mapping[str, Choice]
    default: str

    @property
    def others(self) -> list[str]:
        return [answer for answer in self.answers if answer != self.default]


QUESTIONS = (
    Question(
        "How many images", {f"{size} images": Choice(size) for size in SIZES}, f"{CLASSES * MOST_PER_CLASS} images"
    ),
    Question(
        "Which images",
        {
            "as many of every class": Choice(),
            "at random from all": Choice(kind="any"),
            "correctly classified": Choice(kind="correct"),
            "least sure": Choice(kind="unsure"),
            "most sure": Choice(kind="sure"),
        },
        "as many of every class",
    ),
    Question("At once, or by class", {"at once": Choice(), "by class": Choice(by_class=True)}, "at once"),
)
CHOICES = tuple(dict.fromkeys(choice for question in QUESTIONS for choice in question.answers.values()))
