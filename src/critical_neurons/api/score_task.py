"""Score task: the settings shared by all programs of one call of `score`, and the scores of one program."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from critical_neurons.core.bounds import Bounds
from critical_neurons.core.budget import Budget
from critical_neurons.core.deadline import TimeIsUp, until
from critical_neurons.core.formulation import (
    ByClass,
    Exact,
    Formulation,
    Lagrangian,
    Linearised,
    Paper,
)
from critical_neurons.core.loss import Loss, SquaredLoss
from critical_neurons.core.network import Network
from critical_neurons.core.program import Program
from critical_neurons.core.scores import Incumbent, Scores, spread_scores
from critical_neurons.core.solution import Status, Step, relative_gap
from critical_neurons.core.solver import Solver
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import (
    InfeasibleProgramError,
    SolverError,
)
from critical_neurons.formulations import (
    Goal,
    Objective,
    budget_network,
    encode_literal,
    encode_unchecked,
    find_floor,
)
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.parallel import find_allowed_threads
from critical_neurons.readers import Passage
from critical_neurons.selection.warm_start import Proposal
from critical_neurons.solvers import Backend, Capability, Limits, maximise_dual

PATTERN_ADVICE = (
    "The paper's rows keep the activation pattern of the unpruned network and often leave no room; allow more, use "
    "fewer data points, or take formulation='linearised' or 'exact'."
)

INTERRUPTED = "interrupted"
"""How the note begins if Ctrl-C ended the search."""

NO_TIME = "time limit: it was over before the program was ready"

SCORE_DECIMALS = 6
"""Scores are rounded to the solver's tolerance, so that noise does not decide between equal scores."""

ROUNDED_GAP = 1e-3
"""Allowed increase of the gap by rounding scores."""

ROUNDING = 1e-9
"""Least improvement of an objective that counts."""


@dataclass(frozen=True)
class DataPoints:
    """The data points: the model's values for them, their loss, their digests, and the user's own bounds if given."""

    passage: Passage
    loss: Loss
    digests: NDArray[np.str_]
    bounds: Bounds | None = None

    @property
    def labels(self) -> Ints | Floats:
        """Or targets."""
        return self.loss.targets if isinstance(self.loss, SquaredLoss) else self.loss.labels

    def of_class(self, label: int) -> DataPoints:
        chosen = self.labels == label
        bounds = None if self.bounds is None else self.bounds.at(chosen)
        loss = self.loss.choose(np.flatnonzero(chosen))
        return DataPoints(self.passage.choose(chosen), loss, self.digests[chosen], bounds)


@dataclass(frozen=True)
class ScoreTask:
    """Settings shared by all programs of one call; `record` holds further ones to store with the scores."""

    network: Network
    formulation: Formulation
    budget: Budget | None
    solver: Solver
    backend: Backend
    report: Callable[[Step], None]
    by_class: ByClass | None
    proposal: Proposal | None
    record: dict[str, Any]

    def score_points(self, points: DataPoints, started: float, deadline: float) -> tuple[Scores, bool]:
        """The scores, and whether the search was interrupted by the user."""
        network, formulation = self.network, self.formulation
        goal = self._set_goal()
        try:
            with until(deadline):
                encode = partial(self._encode, points, self._bound(points))
                program = encode(goal)
        except TimeIsUp:
            return self._give_up(points, goal, started), False
        if self.proposal is not None:
            program = replace(program, given=_place(program, self.proposal.mask))
        assert program.unpruned is not None
        logit_error = float(np.abs(program.term.logits(program.unpruned) - points.passage.logits).max())
        limits = Limits(
            max(deadline - time.monotonic(), 0.0),
            self.solver.gap,
            self.solver.threads or find_allowed_threads(),
            self.solver.seed,
            self.solver.options,
        )
        dual = None
        if not isinstance(formulation.loss_weight, Lagrangian):
            del encode  # the bounds need much memory
            solution = self.backend.solve(program, limits, self.report)
        else:
            assert isinstance(goal, Objective)
            increase = formulation.loss_weight.loss_increase
            losses = program.term.values(program.unpruned)
            level = goal.softmax_weight(len(losses)) * float(losses.sum() + len(losses) * increase)
            weighted = partial(replace, goal)
            solution, dual = maximise_dual(
                self.backend, lambda weight: encode(weighted(loss_weight=weight)), level, limits, self.report
            )
            goal = weighted(loss_weight=dual.loss_weight)
        if solution.status is Status.INFEASIBLE:
            advice = PATTERN_ADVICE if isinstance(formulation, Paper) else "Allow more."
            raise InfeasibleProgramError(f"budget: no scores keep within {self.budget}. {advice}")
        if solution.point is None:
            doubt = (
                ""
                if self.budget is None
                else f" There may be none within {self.budget}; solver='highs' can decide that."
            )
            raise SolverError(f"{self.backend.name}: {solution.status.sentence}{doubt}")
        certified = not isinstance(formulation, Linearised)
        notes = (
            *network.notes,
            *(() if certified else ("linearised: a ranking, nothing is certified",)),
            *((INTERRUPTED,) if solution.interrupted else ()),
            *((solution.note,) if solution.note else ()),
        )
        per_unit = np.clip(solution.point[program.blocks["score"]].round(SCORE_DECIMALS), 0.0, 1.0) + 0.0  # no -0.0
        # By definition, from the rounded scores: the objective does not depend on the solver's arithmetic.
        point = solution.point.copy()
        point[program.blocks["score"]] = per_unit
        objective = goal.compute(network, per_unit, program.term.values(point))
        bound = None if solution.bound is None or not certified else min(solution.bound, objective)
        incumbent = None
        if program.given is not None:
            assert self.proposal is not None
            own = goal.compute(network, self.proposal.mask, program.term.values(program.given))
            bound = find_floor(goal, network) if bound is None else bound
            incumbent = Incumbent(self.proposal.rule, own, bound)
            notes += (_describe_incumbent(incumbent, objective),)
            if self.proposal.weights not in (None, network.fingerprint.weights):
                notes += ("incumbent: made with other weights of this network",)
        scores = Scores(
            values_by_layer=spread_scores(network.structure, per_unit),
            structure=network.structure,
            status=_judge(solution.status, relative_gap(objective, bound), self.solver.gap),
            objective=objective,
            bound=bound,
            gap=relative_gap(objective, bound),
            seconds=time.monotonic() - started,
            settings=self.describe(points),
            history=solution.history,
            sizes=solution.sizes,
            logit_error=logit_error,
            notes=notes,
            incumbent=incumbent,
            dual=dual,
            budget=self.budget,
            span=network.span,
            inputs=tuple(points.digests.tolist()),
        )
        return scores, solution.interrupted

    def _give_up(self, points: DataPoints, goal: Goal, started: float) -> Scores:
        """The result without a program: the unpruned network or the incumbent, and the bound that no loss is
        negative."""
        network, proposal = self.network, self.proposal
        if self.budget is not None and proposal is None:
            raise SolverError(f"{NO_TIME}, and scores within {self.budget} have to be looked for. Allow more time.")
        bound = None if isinstance(self.formulation, Linearised) else find_floor(goal, network)
        kept, incumbent, note = np.ones(network.unit_count), None, f"{NO_TIME}: every unit has a score of 1"
        objective = goal.compute(network, kept, points.loss.values(points.passage.logits))
        if proposal is not None:
            assert bound is not None
            logits = network.evaluate(points.passage.inputs, proposal.mask)[-1]
            own = goal.compute(network, proposal.mask, points.loss.values(logits))
            if own < objective or self.budget is not None:
                kept, objective = proposal.mask, own
            incumbent = Incumbent(proposal.rule, own, bound)
            note = f"{NO_TIME}; {_describe_incumbent(incumbent, objective)}"
        return Scores(
            values_by_layer=spread_scores(network.structure, kept),
            structure=network.structure,
            status=Status.FEASIBLE,
            objective=objective,
            bound=bound,
            gap=relative_gap(objective, bound),
            seconds=time.monotonic() - started,
            settings=self.describe(points),
            history=(),
            sizes={},
            logit_error=0.0,  # the model itself was run
            notes=(*network.notes, note),
            incumbent=incumbent,
            budget=self.budget,
            span=network.span,
            inputs=tuple(points.digests.tolist()),
        )

    def weigh(self, loss_weight: float) -> ScoreTask:
        return replace(self, formulation=replace(self.formulation, loss_weight=loss_weight))

    def _set_goal(self) -> Goal:
        if self.budget is not None:
            return budget_network(self.network, self.budget)
        formulation, weight = self.formulation, self.formulation.loss_weight
        # The Lagrangian dual begins with a weight of 1; bisection has set a number before.
        return Objective(formulation.objective, weight if isinstance(weight, float) else 1.0, formulation.rescale)

    def _bound(self, points: DataPoints) -> Bounds:
        if points.bounds is not None:
            return points.bounds
        bound = partial(bound_network, self.network, points.passage.inputs)
        match self.formulation:
            case Paper(input_radius=radius, bounds=str(method)):
                return bound(radius=radius, method=method)
            case Exact(bounds=str(method)):
                return bound(pruned=True, method=method)
            case _:
                return bound()

    def _encode(self, points: DataPoints, bounds: Bounds, goal: Goal) -> Program:
        common = self.network, bounds, points.loss, goal
        tail = points.passage.tail
        match self.formulation:
            case Paper(integer=integer) if Capability.SOURCES not in self.backend.capabilities:
                return encode_literal(*common, integer=integer, tail=tail)
            case Paper(integer=integer):
                return encode_unchecked(*common, formulation="paper", integer=integer, tail=tail)
            case Exact(integer=integer, binary=binary):
                return encode_unchecked(*common, formulation="exact", integer=integer, binary=binary, tail=tail)
            case Linearised():
                return encode_unchecked(*common, formulation="linearised", tail=tail)
            case _:
                assert_never(self.formulation)

    def describe(self, points: DataPoints) -> dict[str, Any]:
        """The settings that scores record."""
        return {
            "formulation": self.formulation,
            "by_class": self.by_class is not None,
            "solver": self.solver,
            "labels": points.labels.tolist(),
            **self.record,
        }


def _judge(status: Status, gap: float | None, wanted: float) -> Status:
    """With huge weights, rounding the scores to the solver's tolerance may exceed the gap."""
    missed = status is Status.OPTIMAL and gap is not None and gap > wanted + ROUNDED_GAP
    return Status.FEASIBLE if missed else status


def _place(program: Program, mask: Floats) -> Floats:
    """The point of the exact program with this mask, by a forward pass."""
    assert program.complete is not None
    point = np.zeros(program.column_count)
    point[program.blocks["score"]] = mask
    return program.raise_term(program.complete(point))


def _describe_incumbent(incumbent: Incumbent, objective: float) -> str:
    """The bound on the given plan, and whether a better one was found."""
    gained = incumbent.objective - objective
    found = f"the scores found are better by {gained:.4g}" if gained > ROUNDING else "nothing better was found"
    return f"incumbent: {incumbent}; {found}"
