"""Solution: the point that a solver found, its bound, and the history of the solve."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from critical_neurons.core.program import Rows
from critical_neurons.core.structure import Floats


class Status(Enum):
    """How a solve ended. The order is from best to worst.

    >>> print(cn.Status.OPTIMAL.sentence)
    Solved to the tolerance asked for.
    """

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    TIMED_OUT = "timed out"
    INFEASIBLE = "infeasible"
    UNBOUNDED = "unbounded"
    FAILED = "failed"

    @property
    def sentence(self) -> str:
        return _SENTENCES[self]

    @property
    def rank(self) -> int:
        return list(Status).index(self)


_SENTENCES = {
    Status.OPTIMAL: "Solved to the tolerance asked for.",
    Status.FEASIBLE: "A feasible point, not proved optimal: stopped early, or found by a search. The gap, if known, "
    "bounds its distance from the optimum.",
    Status.TIMED_OUT: "Stopped before any feasible point was known.",
    Status.INFEASIBLE: "Proved: no point satisfies all rows.",
    Status.UNBOUNDED: "Proved: the objective has no lower end.",
    Status.FAILED: "The solver gave up; neither point nor bound can be trusted.",
}


def relative_gap(objective: float | None, bound: float | None) -> float | None:
    """(objective - bound) / max(1, |objective|), or None where one of the two is missing or infinite."""
    if objective is None or bound is None or not (math.isfinite(objective) and math.isfinite(bound)):
        return None
    return max(0.0, (objective - bound) / max(1.0, abs(objective)))


@dataclass(frozen=True)
class Step:
    """One entry of a solve's history.

    >>> steps = []
    >>> scores = cn.score(model, inputs[:3], labels[:3], progress=steps.append)
    >>> all(isinstance(step, cn.Step) for step in steps)
    True
    >>> print(cn.Step(seconds=1.5, objective=-0.7, bound=-0.8, rows=40, cuts=12))
    1.5 s  incumbent -0.7  bound -0.8  gap 10.0%  rows 40  cuts 12
    """

    time_limit: float | None = field(default=None, kw_only=True, compare=False)
    """Seconds after which the solve ends. Known while it runs; not part of its history."""

    seconds: float
    objective: float | None
    bound: float | None
    rows: int
    cuts: int

    @property
    def gap(self) -> float | None:
        return relative_gap(self.objective, self.bound)

    def __str__(self) -> str:
        """One line of progress, short enough for a terminal of 80 columns."""
        incumbent, bound = ("none" if value is None else f"{value:.6g}" for value in (self.objective, self.bound))
        gap = "unknown" if self.gap is None else f"{self.gap:.1%}"
        counts = f"rows {self.rows}  cuts {self.cuts}"
        limit = "" if self.time_limit is None else f" of at most {self.time_limit:.0f}"
        return f"{self.seconds:.1f}{limit} s  incumbent {incumbent}  bound {bound}  gap {gap}  {counts}"


@dataclass(frozen=True)
class ClassStep(Step):
    """A step of the program of one class; `done` of `classes` programs are solved."""

    label: int
    done: int
    classes: int

    def __str__(self) -> str:
        """Without the size of the program."""
        line = super().__str__().partition("  rows ")[0]
        return f"{self.done} of {self.classes} classes done; class {self.label}: {line}"


@dataclass(frozen=True)
class DualStep(Step):
    """A step of one program in the search for the best loss weight; `number` counts the programs."""

    loss_weight: float
    number: int

    def __str__(self) -> str:
        line = super().__str__().partition("  rows ")[0]
        return f"program {self.number}, loss weight {self.loss_weight:.4g}: {line}"


@dataclass(frozen=True)
class DualTrial:
    """A program in the search for the best loss weight: a lower bound `value` of the dual there, and the sparsity and
    softmax terms of its scores."""

    loss_weight: float
    value: float
    sparsity: float
    softmax: float


@dataclass(frozen=True)
class Dual:
    """The Lagrangian dual (equation 7b) of the least sparsity at a softmax term of at most `level`.

    `loss_weight` is the best one found; `sparsity` and `softmax` are those of the scores. No scores of the program
    within the level have a sparsity below `bound`.
    """

    loss_weight: float
    level: float
    sparsity: float
    softmax: float
    bound: float
    trials: tuple[DualTrial, ...]

    @property
    def gap(self) -> float | None:
        return relative_gap(self.sparsity, self.bound)

    def __str__(self) -> str:
        gap = "unknown" if self.gap is None else f"{self.gap:.3%}"
        programs = f"{len(self.trials)} program{'s' if len(self.trials) > 1 else ''}"
        return (
            f"loss weight {self.loss_weight:.4g} after {programs}: softmax {self.softmax:.4g} of at "
            f"most {self.level:.4g}, sparsity {self.sparsity:.6g}, bound {self.bound:.6g}, gap {gap}"
        )


@dataclass(frozen=True)
class Solution:
    """The best point, what bounds it from below, and the steps on the way.

    >>> network = cn.read_network(model, inputs)
    >>> bounds = cn.bound_network(network, inputs[:3].double().numpy())
    >>> solution = cn.solve(cn.encode(network, bounds, labels[:3].numpy()))
    >>> solution.status, solution.objective >= solution.bound
    (<Status.OPTIMAL: 'optimal'>, True)
    """

    status: Status
    point: Floats | None
    objective: float | None
    bound: float | None
    seconds: float
    history: tuple[Step, ...]
    sizes: Mapping[str, int]
    interrupted: bool = False
    """Whether the user ended it by Ctrl-C."""
    learnt: Rows | None = None
    """Rows of the sources and tangents of the convex term that the solve added: with the program's own rows, the
    linear program whose optimum is the bound."""
    note: str = ""
    """Why there is no better point, if the solver knows."""

    @property
    def gap(self) -> float | None:
        return relative_gap(self.objective, self.bound)
