"""Choices of calibration data: which images, how many, and one search for all or one per class."""

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
    """Number and `kind` of calibration images from the training part, class-balanced unless `any`. `sure` and
    `unsure` go by the margin between the two largest outputs. `by_class`: one search per class, scores averaged."""

    images: int = 1000
    kind: Kind = "even"
    by_class: bool = False

    @property
    def name(self) -> str:
        return f"images-{self.images}/{self.kind}/{'by-class' if self.by_class else 'at-once'}"


@dataclass(frozen=True)
class Question:
    """Alternatives for one choice, by label, and which of them is the default."""

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
            "class-balanced": Choice(),
            "uniformly at random": Choice(kind="any"),
            "correctly classified": Choice(kind="correct"),
            "smallest margin": Choice(kind="unsure"),
            "largest margin": Choice(kind="sure"),
        },
        "class-balanced",
    ),
    Question("At once, or by class", {"at once": Choice(), "by class": Choice(by_class=True)}, "at once"),
)
CHOICES = tuple(dict.fromkeys(choice for question in QUESTIONS for choice in question.answers.values()))
