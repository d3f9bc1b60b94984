"""Score: model and batch to scores, the composition of reading, bounding, encoding and solving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from critical_neurons.core.batch import digest_rows, gather_batch
from critical_neurons.core.bounds import Bounds
from critical_neurons.core.budget import Budget
from critical_neurons.core.deadline import TimeIsUp, until
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.formulation import (
    Bisection,
    ByClass,
    Exact,
    Formulation,
    FormulationName,
    Lagrangian,
    Linearised,
    Paper,
    as_formulation,
    check_together,
)
from critical_neurons.core.loss import Loss, SquaredLoss, make_loss
from critical_neurons.core.network import Network
from critical_neurons.core.program import Program
from critical_neurons.core.scores import Incumbent, Scores, average_scores, spread_scores
from critical_neurons.core.settings import as_names
from critical_neurons.core.solution import ClassStep, Status, Step, relative_gap
from critical_neurons.core.solver import Solver, as_solver
from critical_neurons.core.span import Span
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import (
    InfeasibleProgramError,
    InvalidInputError,
    InvalidSettingError,
    SolverError,
    WorkersError,
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
from critical_neurons.parallel import Piece, Tell, find_allowed_threads, hire
from critical_neurons.readers import LEFT_OUT, Passage, isolated, read_network, run_model
from critical_neurons.selection.warm_start import Proposal, propose_mask
from critical_neurons.solvers import Backend, Capability, Limits, find_solver, ignore_progress, maximise_dual

LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT = 1e-4, 1e4
SHARE_STEPS = 14
"""Bisections for a mean score: the weight is then known to within a tenth of a percent."""

PATTERN_ADVICE = (
    "The paper's rows keep the activation pattern of the unpruned network and often leave no room; allow more, use "
    "fewer data points, or take formulation='linearised' or 'exact'."
)

INTERRUPTED = "interrupted"
"""What a note begins with where Ctrl-C ended the search."""

NO_TIME = "time limit: it was over before the program was ready"

SCORE_DECIMALS = 6
"""The solver's tolerance: what lies below it is noise, which must not decide between equal scores."""

ROUNDED_GAP = 1e-3
"""By which the gap may grow when scores are rounded."""

ROUNDING = 1e-9
"""By which one objective must be below another to be called better."""


@isolated
def score(
    model: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    formulation: Formulation | ByClass | FormulationName = "paper",
    budget: Budget | None = None,
    solver: Solver | str = "auto",
    ignore: str | Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Scores:
    """Importance scores of every neuron and feature map: the program of docs/method.md, solved.

    `inputs` is a tensor or array (batch, ...) with `labels` (batch,) beside it, or an iterable of batches or of pairs
    (inputs, labels). Without labels the model's own predictions are used.

    * `formulation`: which program, and what it minimises: `cn.Paper(loss_weight=5.0, ...)`, `cn.Exact(...)` or
      `cn.Linearised(...)`, or the name of one in lower case; in `cn.ByClass(...)`, one program per class. `help` of
      each lists its settings; that of `cn.Objective` explains the three objectives.
    * `budget`: in place of the sparsity term, at most this share kept: `cn.Budget(units=0.5)` of every layer (with
      `scope="global"` of all), `cn.Budget(params=0.5)` or `cn.Budget(macs=0.5)`.
    * `solver`: `cn.Solver("highs", time_limit=300, ...)`, or its name alone. The time limit, Ctrl-C and workers that
      are lost leave the best scores so far: of the classes that are done, the average.
    * `ignore`: names of layers that get no scores. `progress` is called with every `Step`.
    * `start`, `stop`: names of the first and of the last module that is read and scored, as in `named_modules`; of a
      container its first and its last call, of a function the name torch.fx gives it. What comes before is run as it
      is: its outputs are what the program takes for inputs, and `input_radius` is around them. What follows is run as
      well, and stands in the program to first order at every data point. Budgets are shares of the span.

    >>> scores = cn.score(model, inputs[:3], labels[:3])
    >>> scores.status
    <Status.OPTIMAL: 'optimal'>
    >>> {name: values.shape for name, values in scores.items()}
    {'0': (4,), '3': (8,)}
    """
    by_class = formulation if isinstance(formulation, ByClass) else None
    program = as_formulation(formulation.formulation if isinstance(formulation, ByClass) else formulation)
    check_together(program, budget, Span(start, stop))
    ignored, told = as_names(ignore), as_solver(solver)
    started = time.monotonic()
    backend = find_solver(told.name)
    backend.check_options(told.options)
    batch = gather_batch(inputs, labels, real=True)
    network = read_network(model, torch.from_numpy(batch.inputs), ignore=ignored, start=start, stop=stop)
    if not network.removable:
        raise InvalidInputError(f"the network has nothing to score:\n{network}")
    passage = run_model(model, batch.inputs, network.span)
    aim = make_loss(program.loss, batch, passage.logits)
    if isinstance(aim, SquaredLoss):
        _check_squared(network, by_class)
    own = None
    if not isinstance(program, Linearised) and isinstance(program.bounds, Bounds):
        own = program.bounds
        _check_own(own, network, passage.inputs, program)
    incumbent = program.incumbent if isinstance(program, Exact) else None
    task = _Task(
        network,
        program.without_data(),
        budget,
        told,
        backend,
        progress or ignore_progress,
        by_class,
        proposal=None if incumbent is None else propose_mask(incumbent, network, budget),
        record={
            "ignore": list(ignored),
            "input_shape": list(batch.inputs.shape[1:]),
            "labels_from": "model" if batch.labels is None and batch.targets is None else "user",
            "bounds_from": "program" if own is None else "user",
            "versions": describe_versions("torch", "numpy", "scipy", "highspy"),
        },
    )
    digests = np.array(digest_rows(batch.inputs))
    points = _Points(passage, aim, digests, own)
    if isinstance(program.loss_weight, Bisection):
        return task.score_for_share(points, program.loss_weight.mean_score, started)
    return task.score_all(points, started)[0]


@dataclass(frozen=True)
class _Points:
    """What the model itself makes of the data points, their loss, what they are known by, and the user's bounds, if
    they are to be used."""

    passage: Passage
    loss: Loss
    digests: NDArray[np.str_]
    bounds: Bounds | None = None

    @property
    def labels(self) -> Ints | Floats:
        """Or targets."""
        return self.loss.targets if isinstance(self.loss, SquaredLoss) else self.loss.labels

    def of_class(self, label: int) -> _Points:
        chosen = self.labels == label
        bounds = None if self.bounds is None else self.bounds.at(chosen)
        loss = self.loss.choose(np.flatnonzero(chosen))
        return _Points(self.passage.choose(chosen), loss, self.digests[chosen], bounds)


@dataclass(frozen=True)
class _Task:
    """What all programs of one call have in common; `record` is what else is told of them."""

    network: Network
    formulation: Formulation
    budget: Budget | None
    solver: Solver
    backend: Backend
    report: Callable[[Step], None]
    by_class: ByClass | None
    proposal: Proposal | None
    record: dict[str, Any]

    def score_for_share(self, points: _Points, wanted: float, started: float) -> Scores:
        """Bisection for the largest λ at which the mean score is at most the share wanted.

        The sparsity of an optimum never rises when λ falls, so the search is sound up to the gap.
        """
        low, high = LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT
        best, interrupted = self._weigh(low).score_all(points, started)
        if best.per_unit.mean() > wanted and best.status is not Status.OPTIMAL:
            raise SolverError(
                f"mean_score: the search was stopped before it knew whether a mean of {wanted:.4g} is possible."
            )
        if best.per_unit.mean() > wanted:
            raise InfeasibleProgramError(
                f"mean_score: a mean of {wanted:.4g} cannot be reached; even at loss_weight={low:g} it is "
                f"{best.per_unit.mean():.4g}. {PATTERN_ADVICE}"
            )
        stopped = ", stopped at once" if interrupted else ""
        for step in range(0 if interrupted else SHARE_STEPS):
            middle = math.sqrt(low * high)
            scores, interrupted = self._weigh(middle).score_all(points, started)
            if scores.status is Status.OPTIMAL and scores.per_unit.mean() <= wanted:
                low, best = middle, scores
            else:
                high = middle
            if interrupted or time.monotonic() - started >= self.solver.time_limit:
                stopped = f", stopped after {step + 1} of {SHARE_STEPS} steps"
                break
        note = f"loss_weight {low:.4g} found for a mean score of {wanted:.4g}{stopped}"
        settings = {**best.settings, "mean_score": wanted}
        return replace(best, settings=settings, seconds=time.monotonic() - started, notes=(*best.notes, note))

    def score_all(self, points: _Points, started: float) -> tuple[Scores, bool]:
        """The scores, and whether the user interrupted the search."""
        if self.by_class is not None:
            return self.score_by_class(self.by_class, points, started)
        return self.score_points(points, started, started + self.solver.time_limit)

    def score_by_class(self, by_class: ByClass, points: _Points, started: float) -> tuple[Scores, bool]:
        """One program per class with an equal share of the time left. Ctrl-C and lost workers leave the classes done
        so far."""
        classes = [int(label) for label in np.unique(points.labels)]
        earlier = by_class.earlier
        parts = {label: known for label in classes if (known := self._find_earlier(earlier, points.of_class(label)))}
        missing = [label for label in classes if label not in parts]

        def hear(label: str, step: Step) -> None:
            common = {each.name: getattr(step, each.name) for each in fields(Step)}
            self.report(ClassStep(**common, label=int(label), done=len(parts), classes=len(classes)))

        interrupted = False
        reasons: list[str] = []
        try:
            with hire(by_class.workers, most=len(missing), threads=self.solver.threads or 1, hear=hear) as crew:

                def list_pieces() -> Iterator[tuple[str, Piece]]:
                    for begun, label in enumerate(missing):
                        rounds = math.ceil((len(missing) - begun) / crew.slots)
                        share = (started + self.solver.time_limit - time.monotonic()) / rounds
                        yield str(label), partial(_score_class, self._alone(), points.of_class(label), share)

                for done in crew.run(list_pieces()):
                    if isinstance(done.error, WorkersError):
                        reasons.append(f"class {done.name}: {done.error}")
                        continue
                    if done.error is not None:
                        raise done.error
                    parts[int(done.name)], interrupted = done.result
                    if interrupted:
                        break
        except (KeyboardInterrupt, WorkersError) as stop:
            if len(parts) == len(classes) - len(missing):  # nothing that was not known before
                raise
            interrupted = True
            reasons.extend([str(stop)] if isinstance(stop, WorkersError) else [])
        if not parts:
            raise WorkersError(" ".join(reasons))
        count = f"{INTERRUPTED}: {len(parts)} of {len(classes)} classes averaged"
        notes = () if len(parts) == len(classes) else ("; ".join([count, *reasons]),)
        seconds = time.monotonic() - started
        ordered = [parts[label] for label in classes if label in parts]
        return average_scores(ordered, settings=self._describe(points), seconds=seconds, notes=notes), interrupted

    def _alone(self) -> _Task:
        """What another process needs of it."""
        return replace(self, report=ignore_progress, by_class=ByClass())

    def _find_earlier(self, earlier: Scores | None, points: _Points) -> Scores | None:
        """The same program, solved before and not interrupted."""
        if earlier is None:
            return None
        network, record, inputs = self.network, self._describe(points), tuple(points.digests.tolist())
        for part in earlier.parts:
            asked = part.fingerprint, part.span, part.settings, part.budget, part.inputs
            stopped = any(note.startswith(INTERRUPTED) for note in part.notes)
            if asked == (network.fingerprint, network.span, record, self.budget, inputs) and not stopped:
                return part
        return None

    def score_points(self, points: _Points, started: float, deadline: float) -> tuple[Scores, bool]:
        """The scores, and whether the search was interrupted by the user."""
        network, formulation = self.network, self.formulation
        goal = self._set_goal()
        try:
            with until(deadline if self.proposal is None else math.inf):  # what was given is not lost
                bounds = self._bound(points)
                program = self._encode(points, bounds, goal)
        except TimeIsUp:
            return self._keep_all(points, goal, started), False
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
            solution = self.backend.solve(program, limits, self.report)
        else:
            assert isinstance(goal, Objective)
            increase = formulation.loss_weight.loss_increase
            losses = program.term.values(program.unpruned)
            level = goal.softmax_weight(len(losses)) * float(losses.sum() + len(losses) * increase)
            weighted = partial(replace, goal)
            solution, dual = maximise_dual(
                self.backend,
                lambda weight: self._encode(points, bounds, weighted(loss_weight=weight)),
                level,
                limits,
                self.report,
            )
            goal = weighted(loss_weight=dual.loss_weight)
        if solution.status is Status.INFEASIBLE:
            advice = PATTERN_ADVICE if isinstance(formulation, Paper) else "Allow more."
            raise InfeasibleProgramError(f"budget: no scores keep within {self.budget}. {advice}")
        if solution.point is None:
            raise SolverError(f"{self.backend.name}: {solution.status.sentence}")
        certified = not isinstance(formulation, Linearised)
        notes = (
            *network.notes,
            *(() if certified else ("linearised: a ranking, nothing is certified",)),
            *((INTERRUPTED,) if solution.interrupted else ()),
        )
        per_unit = np.clip(solution.point[program.blocks["score"]].round(SCORE_DECIMALS), 0.0, 1.0) + 0.0  # no -0.0
        # Of the scores as they are reported, by its definition: nothing depends on how a solver adds up.
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
            settings=self._describe(points),
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

    def _keep_all(self, points: _Points, goal: Goal, started: float) -> Scores:
        """What is known without a program: the unpruned network, and that no loss is below zero."""
        if self.budget is not None:
            raise SolverError(f"{NO_TIME}, and scores within {self.budget} have to be looked for. Allow more time.")
        network = self.network
        kept = np.ones(network.unit_count)
        objective = goal.compute(network, kept, points.loss.values(points.passage.logits))
        bound = None if isinstance(self.formulation, Linearised) else find_floor(goal, network)
        return Scores(
            values_by_layer=spread_scores(network.structure, kept),
            structure=network.structure,
            status=Status.FEASIBLE,
            objective=objective,
            bound=bound,
            gap=relative_gap(objective, bound),
            seconds=time.monotonic() - started,
            settings=self._describe(points),
            history=(),
            sizes={},
            logit_error=0.0,  # the model itself was run
            notes=(*network.notes, f"{NO_TIME}: every unit has a score of 1"),
            budget=self.budget,
            span=network.span,
            inputs=tuple(points.digests.tolist()),
        )

    def _weigh(self, loss_weight: float) -> _Task:
        return replace(self, formulation=replace(self.formulation, loss_weight=loss_weight))

    def _set_goal(self) -> Goal:
        if self.budget is not None:
            return budget_network(self.network, self.budget)
        formulation, weight = self.formulation, self.formulation.loss_weight
        # The Lagrangian dual begins with a weight of 1; bisection has set a number before.
        return Objective(formulation.objective, weight if isinstance(weight, float) else 1.0, formulation.rescale)

    def _bound(self, points: _Points) -> Bounds:
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

    def _encode(self, points: _Points, bounds: Bounds, goal: Goal) -> Program:
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

    def _describe(self, points: _Points) -> dict[str, Any]:
        """The settings as scores keep them."""
        return {
            "formulation": self.formulation,
            "by_class": self.by_class is not None,
            "solver": self.solver,
            "labels": points.labels.tolist(),
            **self.record,
        }


def _score_class(task: _Task, points: _Points, seconds: float, tell: Tell) -> tuple[Scores, bool]:
    now = time.monotonic()
    return replace(task, report=tell).score_points(points, now, now + seconds)


def _judge(status: Status, gap: float | None, wanted: float) -> Status:
    """Scores are rounded to the solver's tolerance. Where weights are huge that alone may cost the gap."""
    missed = status is Status.OPTIMAL and gap is not None and gap > wanted + ROUNDED_GAP
    return Status.FEASIBLE if missed else status


def _place(program: Program, mask: Floats) -> Floats:
    """The point of the exact program with this mask: a forward pass."""
    assert program.complete is not None
    point = np.zeros(program.column_count)
    point[program.blocks["score"]] = mask
    return program.raise_term(program.complete(point))


def _describe_incumbent(incumbent: Incumbent, objective: float) -> str:
    """What is certified of the plan given, and whether a better one was found."""
    gained = incumbent.objective - objective
    found = f"the scores found are better by {gained:.4g}" if gained > ROUNDING else "nothing better was found"
    return f"incumbent: {incumbent}; {found}"


def _check_squared(network: Network, by_class: ByClass | None) -> None:
    if by_class is not None:
        raise InvalidSettingError("ByClass: the squared loss has targets, which are of no class.")
    left_out = [note for note in network.notes if LEFT_OUT in note]
    if left_out:
        raise InvalidSettingError(
            f"loss: 'squared' is of the model's outputs, but {left_out[0]}. Give classes, or take the last step away."
        )


def _check_own(bounds: Bounds, network: Network, inputs: Floats, formulation: Paper | Exact) -> None:
    radius = formulation.input_radius if isinstance(formulation, Paper) else 0.0
    pruned = isinstance(formulation, Exact)
    if (bounds.radius, bounds.pruned) != (radius, pruned):
        raise InvalidSettingError(
            f"bounds: found radius={bounds.radius}, pruned={bounds.pruned}. Accepted: those of input_radius and "
            f"formulation, radius={radius}, pruned={pruned}."
        )
    if not np.array_equal(bounds.inputs, inputs):
        raise InvalidSettingError("bounds: made for other inputs, or the same in another order. Make them for these.")
    bounds.check(network)
