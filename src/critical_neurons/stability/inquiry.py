"""Inquiry: questions about pre-activations on one box, each answered and reported as soon as possible."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from critical_neurons.stability.reach import Answer, ReachSearch
from critical_neurons.stability.relaxation import Relaxation

ROUNDS = (1, 32, 512, 10**9)
"""Limits on the linear programs per question in successive rounds, so that hard questions come last."""


@dataclass(frozen=True)
class Question:
    """Whether sign · p <= 0 for the element in a row of the relaxation. If that does not decide a unit (`settles`),
    only the bound of the first linear program is needed."""

    unit: int
    element: int
    row: int
    sign: float
    settles: bool = True


@dataclass(frozen=True)
class Reply:
    question: Question
    answer: Answer


@dataclass(frozen=True)
class Inquiry:
    """Questions about box `sample`, unit by unit, the most doubtful first."""

    relaxation: Relaxation
    sample: int
    questions: tuple[Question, ...]
    slack: float

    def split(self, parts: int) -> list[Inquiry]:
        """Split into at most `parts`, with all questions about a unit together."""
        keys = list(dict.fromkeys((each.unit, each.sign) for each in self.questions))
        dealt = [set(keys[first::parts]) for first in range(min(parts, len(keys)))]
        return [replace(self, questions=tuple(q for q in self.questions if (q.unit, q.sign) in own)) for own in dealt]

    def answer(self, send: Callable[[Reply], None], seconds: float = np.inf) -> None:
        """Further questions about a unit are skipped once one is refuted, or in a round in which one stays open."""
        deadline = time.monotonic() + seconds
        search = ReachSearch(self.relaxation)
        waiting = list(self.questions)
        refuted: set[tuple[int, float]] = set()
        for most in ROUNDS:
            left: list[Question] = []
            stuck: set[tuple[int, float]] = set()
            for question in waiting:
                key = question.unit, question.sign
                if question.settles and (key in refuted or key in stuck):
                    left.append(question)
                    continue
                if time.monotonic() >= deadline:
                    return
                found = search.ask(question.row, question.sign, self.slack, deadline, most)
                send(Reply(question, found))
                if not question.settles:
                    continue
                refuted |= self._refute(found)
                if found.seen <= self.slack < found.bound:
                    stuck.add(key)
                    left.append(question)
            waiting = [question for question in left if (question.unit, question.sign) not in refuted]
            if not waiting:
                return

    def _refute(self, found: Answer) -> set[tuple[int, float]]:
        """The units and signs that the point of an answer refutes, of all that are asked about."""
        if not np.isfinite(found.seen):
            return set()
        reached = self.relaxation.wanted.at(self.relaxation.complete(found.inputs))
        return {(each.unit, each.sign) for each in self.questions if each.sign * reached[each.row] > self.slack}
