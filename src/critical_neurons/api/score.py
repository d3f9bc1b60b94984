"""Score: model and batch to scores, the composition of reading, bounding, encoding and solving."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from critical_neurons.core.batch import check_classes, digest_rows, gather_batch
from critical_neurons.core.bounds import Bounds
from critical_neurons.core.environment import describe_versions
from critical_neurons.core.network import Floats, Ints, Network, Shape
from critical_neurons.core.plan import Plan
from critical_neurons.core.program import Program
from critical_neurons.core.scores import Incumbent, Scores, average_scores
from critical_neurons.core.settings import BoundsName, FormulationName, ObjectiveName, Settings, as_names
from critical_neurons.core.solution import ClassStep, Status, Step, relative_gap
from critical_neurons.core.workers import HERE, Workers
from critical_neurons.errors import (
    InfeasibleProgramError,
    InvalidInputError,
    InvalidSettingError,
    SolverError,
    WorkersError,
)
from critical_neurons.formulations import Goal, Objective, encode, encode_literal, find_floor, read_budget
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.parallel import Piece, Tell, find_allowed_threads, hire
from critical_neurons.readers import Passage, on_cpu, read_network, run_model
from critical_neurons.selection.warm_start import Proposal, check_incumbent, propose_mask
from critical_neurons.solvers import Capability, Limits, Solver, find_solver, ignore_progress, maximise_dual

LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT = 1e-4, 1e4
SHARE_STEPS = 14
"""Bisections for loss_weight="auto": the weight is then known to within a tenth of a percent."""

PATTERN_ADVICE = (
    "The paper's rows keep the activation pattern of the unpruned network and often leave no room; allow more, use "
    "fewer data points, or take formulation='linearised' or 'exact'."
)

INTERRUPTED = "interrupted"
"""What a note begins with where Ctrl-C ended the search."""

SCORE_DECIMALS = 6
"""The solver's tolerance: what lies below it is noise, which must not decide between equal scores."""

ROUNDING = 1e-9
"""By which one objective must be below another to be called better."""


@on_cpu
def score(
    model: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    loss_weight: float | Literal["auto", "lagrangian"] = 5.0,
    input_radius: float = 0.0,
    objective: ObjectiveName = "balanced",
    rescale: float = 2.0,
    formulation: FormulationName = "paper",
    integer: bool = True,
    binary: bool = False,
    bounds: BoundsName | Bounds = "interval",
    budget: Mapping[str, Any] | None = None,
    units: float | None = None,
    loss_increase: float | None = None,
    by_class: bool = False,
    solver: str = "auto",
    solver_options: Mapping[str, Any] | None = None,
    time_limit: float = 300.0,
    gap: float = 1e-4,
    threads: int | None = None,
    seed: int = 0,
    ignore: Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    progress: Callable[[Step], None] | None = None,
    workers: Workers = HERE,
    earlier: Scores | None = None,
    incumbent: Plan | Scores | None = None,
) -> Scores:
    """Importance scores of every neuron and feature map: the program of docs/method.md, solved.

    `inputs` is a tensor or array (batch, ...) with `labels` (batch,) beside it, or an iterable of batches or of pairs
    (inputs, labels). Without labels the model's own predictions are used.

    * `loss_weight`: λ, what the softmax term counts against sparsity; "auto" searches the largest λ at which the mean
      score is at most `units`; "lagrangian" the λ that maximises the Lagrangian dual of the least sparsity at a mean
      loss of at most the unpruned network's plus `loss_increase`. The scores keep to that; `scores.dual` has λ and
      what is proved.
    * `input_radius`: ε, half width of the box around each input from which the bounds come.
    * `objective`: what the sum of a layer's scores is divided by: "balanced", its units; "authors", its units times
      kernel height times width, as in the authors' code; "paper", all units of the network, as printed, and there the
      softmax term is a sum over the data points, not a mean. `rescale`: c of the sparsity term.
    * `formulation`: "paper"; "exact", whose points with `binary=True` are forward passes of the masked network, so
      that the bound is one on its loss; "linearised", gates as at the data points and no rows: fast, nothing proved.
    * `integer`: False relaxes the gates.
    * `bounds`: where the bounds come from: "interval" arithmetic; "backward" substitution, tighter and slower; or
      `Bounds` of your own for these inputs (pruned for the exact formulation), tried before use.
    * `budget`: in place of the sparsity term, at most this share kept: {"units": 0.5} of every layer (with "scope":
      "global" of all), {"params": 0.5} or {"macs": 0.5}.
    * `by_class`: one program per class; the scores are averaged, `scores.parts` keeps them. `workers` solve several
      at once, each on one thread unless `threads` says more: the scores are the same for any workers. Classes that
      `earlier` scores hold for the same network, inputs and settings are not solved again.
    * `solver`: "auto" is "highs", or, with many data points or units and no gates to be whole, "barrier", interior
      points of our own; or "scip", or "cvxpy:NAME", which gets the paper's program literally, with every activation
      and gate. `solver_options` are handed to it.
    * `time_limit` in seconds, `gap`: when to stop. Ctrl-C stops too. Both leave the best scores so far, and so do
      workers that are lost: of the classes that are done, the average.
    * `incumbent`: a plan from anywhere, or scores that are one (0 or 1 each, or found under a budget), with
      `formulation="exact", binary=True`. What is returned is no worse; `scores.incumbent` and a note say how much
      better than the plan any other scores of 0 or 1 could be, within the budget if there is one.
    * `ignore`: names of layers that get no scores. `progress` is called with every `Step`.
    * `start`, `stop`: names of the first and of the last module that is read and scored, as in `named_modules`; of a
      container its first and its last call, of a function the name torch.fx gives it. What comes before is run as it
      is: its outputs are what the program takes for inputs, and `input_radius` is around them. What follows is run as
      well, and stands in the program to first order at every data point. Budgets are shares of the span.
    """
    settings = Settings(
        loss_weight=loss_weight,
        input_radius=input_radius,
        objective=objective,
        rescale=rescale,
        formulation=formulation,
        integer=integer,
        binary=binary,
        bounds="user" if isinstance(bounds, Bounds) else bounds,
        budget=budget,
        units=units,
        loss_increase=loss_increase,
        by_class=by_class,
        solver=solver,
        solver_options=dict(solver_options or {}),
        time_limit=time_limit,
        gap=gap,
        threads=threads,
        seed=seed,
        ignore=as_names(ignore),
        start=start,
        stop=stop,
    )
    if earlier is not None and not isinstance(earlier, Scores):
        raise InvalidInputError(f"earlier: found {type(earlier).__name__}. Accepted: Scores, as cn.score gives them.")
    if not by_class and (workers != HERE or earlier is not None):
        raise InvalidSettingError("workers and earlier: go with by_class=True. A single program is a single piece.")
    if incumbent is not None:
        check_incumbent(incumbent, settings)
    started = time.monotonic()
    found = find_solver(settings.solver)
    found.check_options(settings.solver_options)
    batch = gather_batch(inputs, labels)
    network = read_network(model, torch.from_numpy(batch.inputs), ignore=settings.ignore, start=start, stop=stop)
    if not network.scored:
        raise InvalidInputError(f"the network has nothing to score:\n{network}")
    passage = run_model(model, batch.inputs, network.span)
    predictions = passage.logits.argmax(axis=1)
    if batch.labels is not None:
        check_classes(batch.labels, passage.logits.shape[1])
    own = bounds if isinstance(bounds, Bounds) else None
    if settings.bounds == "user":
        _check_own(own, network, passage.inputs, settings)
    task = _Task(
        network,
        settings,
        found,
        progress or ignore_progress,
        input_shape=batch.inputs.shape[1:],
        labelled=batch.labels is not None,
        workers=workers,
        earlier=() if earlier is None else earlier.parts,
        proposal=None if incumbent is None else propose_mask(incumbent, network, settings.budget),
    )
    digests = np.array(digest_rows(batch.inputs))
    points = _Points(passage, predictions if batch.labels is None else batch.labels, digests, own)
    if settings.loss_weight == "auto":
        return task.score_for_share(points, started)
    return task.score_all(points, started)[0]


@dataclass(frozen=True)
class _Points:
    """What the model itself makes of the data points, their labels, what they are known by, and the user's bounds, if
    they are to be used."""

    passage: Passage
    labels: Ints
    digests: NDArray[np.str_]
    bounds: Bounds | None = None

    def of_class(self, label: int) -> _Points:
        chosen = self.labels == label
        bounds = None if self.bounds is None else self.bounds.at(chosen)
        return _Points(self.passage.choose(chosen), self.labels[chosen], self.digests[chosen], bounds)


@dataclass(frozen=True)
class _Task:
    """What all programs of one call have in common."""

    network: Network
    settings: Settings
    solver: Solver
    report: Callable[[Step], None]
    input_shape: Shape
    labelled: bool
    workers: Workers = HERE
    earlier: tuple[Scores, ...] = ()
    proposal: Proposal | None = None

    def score_for_share(self, points: _Points, started: float) -> Scores:
        """Bisection for the largest λ at which the mean score is at most the share wanted.

        The sparsity of an optimum never rises when λ falls, so the search is sound up to the gap.
        """
        wanted = self.settings.units
        assert wanted is not None
        low, high = LEAST_LOSS_WEIGHT, MOST_LOSS_WEIGHT
        least = replace(self, settings=replace(self.settings, loss_weight=low, units=None))
        best, interrupted = least.score_all(points, started)
        if best.per_unit.mean() > wanted and best.status is not Status.OPTIMAL:
            raise SolverError(
                f"units: the search was stopped before it knew whether a mean of {wanted:.4g} is possible."
            )
        if best.per_unit.mean() > wanted:
            raise InfeasibleProgramError(
                f"units: a mean score of {wanted:.4g} cannot be reached; even at loss_weight={low:g} it is "
                f"{best.per_unit.mean():.4g}. {PATTERN_ADVICE}"
            )
        stopped = ", stopped at once" if interrupted else ""
        for step in range(0 if interrupted else SHARE_STEPS):
            middle = math.sqrt(low * high)
            task = replace(self, settings=replace(self.settings, loss_weight=middle, units=None))
            scores, interrupted = task.score_all(points, started)
            if scores.status is Status.OPTIMAL and scores.per_unit.mean() <= wanted:
                low, best = middle, scores
            else:
                high = middle
            if interrupted or time.monotonic() - started >= self.settings.time_limit:
                stopped = f", stopped after {step + 1} of {SHARE_STEPS} steps"
                break
        note = f"loss_weight {low:.4g} found for a mean score of {wanted:.4g}{stopped}"
        settings = {**best.settings, "units": wanted, "loss_weight_from": "auto"}
        return replace(best, settings=settings, seconds=time.monotonic() - started, notes=(*best.notes, note))

    def score_all(self, points: _Points, started: float) -> tuple[Scores, bool]:
        """The scores, and whether the user interrupted the search."""
        if self.settings.by_class:
            return self.score_by_class(points, started)
        return self.score_points(points, started, started + self.settings.time_limit)

    def score_by_class(self, points: _Points, started: float) -> tuple[Scores, bool]:
        """One program per class with an equal share of the time left. Ctrl-C and lost workers leave the classes done
        so far."""
        classes = [int(label) for label in np.unique(points.labels)]
        parts = {label: known for label in classes if (known := self._find_earlier(points.of_class(label)))}
        missing = [label for label in classes if label not in parts]

        def hear(label: str, step: Step) -> None:
            common = {each.name: getattr(step, each.name) for each in fields(Step)}
            self.report(ClassStep(**common, label=int(label), done=len(parts), classes=len(classes)))

        interrupted = False
        reasons: list[str] = []
        try:
            with hire(self.workers, most=len(missing), threads=self.settings.threads or 1, hear=hear) as crew:

                def list_pieces() -> Iterator[tuple[str, Piece]]:
                    for begun, label in enumerate(missing):
                        rounds = math.ceil((len(missing) - begun) / crew.slots)
                        share = (started + self.settings.time_limit - time.monotonic()) / rounds
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
        return average_scores(ordered, settings=self._record(points), seconds=seconds, notes=notes), interrupted

    def _alone(self) -> _Task:
        """What another process needs of it."""
        return replace(self, report=ignore_progress, workers=HERE, earlier=())

    def _find_earlier(self, points: _Points) -> Scores | None:
        """The same program, solved before and not interrupted."""
        record = self._record(points)
        for part in self.earlier:
            stopped = any(note.startswith(INTERRUPTED) for note in part.notes)
            if part.fingerprint == self.network.fingerprint and part.settings == record and not stopped:
                return part
        return None

    def score_points(self, points: _Points, started: float, deadline: float) -> tuple[Scores, bool]:
        """The scores, and whether the search was interrupted by the user."""
        settings, network = self.settings, self.network
        goal = self._set_goal()
        bounds = self._bound(points)
        program = self._encode(points, bounds, goal)
        if self.proposal is not None:
            program = replace(program, given=_place(program, self.proposal.mask))
        assert program.unpruned is not None
        logit_error = float(np.abs(program.term.logits(program.unpruned) - points.passage.logits).max())
        limits = Limits(
            max(deadline - time.monotonic(), 0.0),
            settings.gap,
            settings.threads or find_allowed_threads(),
            settings.seed,
            options=settings.solver_options,
        )
        dual = None
        if settings.loss_increase is None:
            solution = self.solver.solve(program, limits, self.report)
        else:
            assert isinstance(goal, Objective)
            losses = program.term.values(program.unpruned)
            level = goal.softmax_weight(len(losses)) * float(losses.sum() + len(losses) * settings.loss_increase)
            weighted = partial(replace, goal)
            solution, dual = maximise_dual(
                self.solver,
                lambda weight: self._encode(points, bounds, weighted(loss_weight=weight)),
                level,
                limits,
                self.report,
            )
            goal = weighted(loss_weight=dual.loss_weight)
        if solution.status is Status.INFEASIBLE:
            advice = PATTERN_ADVICE if settings.formulation == "paper" else "Allow more."
            raise InfeasibleProgramError(f"budget: no scores keep within {dict(settings.budget or {})}. {advice}")
        if solution.point is None:
            raise SolverError(f"{self.solver.name}: {solution.status.sentence}")
        certified = settings.formulation != "linearised"
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
            values_by_layer={layer.name: per_unit[layer.units] for layer in network.scored},
            layers=network.layers,
            groups=network.groups,
            holds=network.holds,
            wirings=network.wirings,
            fingerprint=network.fingerprint,
            status=solution.status,
            objective=objective,
            bound=bound,
            gap=relative_gap(objective, bound),
            seconds=time.monotonic() - started,
            settings=self._record(points),
            history=solution.history,
            sizes=solution.sizes,
            logit_error=logit_error,
            notes=notes,
            incumbent=incumbent,
            dual=dual,
        )
        return scores, solution.interrupted

    def _set_goal(self) -> Goal:
        settings = self.settings
        if settings.budget is None:
            assert settings.loss_weight != "auto"
            weight = 1.0 if settings.loss_weight == "lagrangian" else settings.loss_weight
            return Objective(settings.objective, weight, settings.rescale)
        return read_budget(self.network, settings.budget)

    def _bound(self, points: _Points) -> Bounds:
        settings = self.settings
        if points.bounds is not None:
            return points.bounds
        assert settings.bounds != "user"
        return bound_network(
            self.network,
            points.passage.inputs,
            radius=settings.input_radius,
            pruned=settings.formulation == "exact",
            method=settings.bounds,
        )

    def _encode(self, points: _Points, bounds: Bounds, goal: Goal) -> Program:
        settings, network = self.settings, self.network
        if settings.formulation == "paper" and Capability.SOURCES not in self.solver.capabilities:
            return encode_literal(
                network, bounds, points.labels, goal, integer=settings.integer, tail=points.passage.tail
            )
        return encode(
            network,
            bounds,
            points.labels,
            goal,
            formulation=settings.formulation,
            integer=settings.integer,
            binary=settings.binary,
            tail=points.passage.tail,
        )

    def _record(self, points: _Points) -> dict[str, Any]:
        return {
            **self.settings.to_dict(),
            "labels": points.labels.tolist(),
            "inputs": points.digests.tolist(),
            "input_shape": list(self.input_shape),
            "labels_from": "user" if self.labelled else "model",
            "versions": describe_versions("torch", "numpy", "scipy", "highspy"),
        }


def _score_class(task: _Task, points: _Points, seconds: float, tell: Tell) -> tuple[Scores, bool]:
    now = time.monotonic()
    return replace(task, report=tell).score_points(points, now, now + seconds)


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


def _check_own(bounds: Bounds | None, network: Network, inputs: Floats, settings: Settings) -> None:
    if bounds is None:
        raise InvalidSettingError("bounds: found 'user'. Give the Bounds themselves.")
    pruned = settings.formulation == "exact"
    if (bounds.radius, bounds.pruned) != (settings.input_radius, pruned):
        raise InvalidSettingError(
            f"bounds: found radius={bounds.radius}, pruned={bounds.pruned}. Accepted: those of input_radius and "
            f"formulation, radius={settings.input_radius}, pruned={pruned}."
        )
    if not np.array_equal(bounds.inputs, inputs):
        raise InvalidSettingError("bounds: made for other inputs, or the same in another order. Make them for these.")
    bounds.check(network)
