"""Scoring: model and batch to scores, the composition of reading, bounding, encoding and solving."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn

from critical_neurons.batch import check_classes, gather_batch
from critical_neurons.bounding import bound_network
from critical_neurons.encoding.literal import encode_literal
from critical_neurons.encoding.objective import Objective
from critical_neurons.encoding.paper import encode_paper
from critical_neurons.errors import InvalidInputError, SolverError
from critical_neurons.network import Floats, Ints, Network
from critical_neurons.reading import read_network, run_to_logits
from critical_neurons.scores import Scores, average_scores
from critical_neurons.settings import ObjectiveName, Settings
from critical_neurons.solution import Step
from critical_neurons.solving import Capability, Limits, Solver, find_solver, ignore_progress

SCORE_DECIMALS = 6
"""The solver's tolerance: what lies below it is noise, which must not decide between equal scores."""


def score(
    model: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    loss_weight: float = 5.0,
    input_radius: float = 0.0,
    objective: ObjectiveName = "published",
    rescale: float = 2.0,
    integer: bool = True,
    by_class: bool = False,
    solver: str = "highs",
    time_limit: float = 300.0,
    gap: float = 1e-4,
    threads: int | None = None,
    seed: int = 0,
    ignore: Collection[str] = (),
    progress: Callable[[Step], None] | None = None,
) -> Scores:
    """Importance scores of every neuron and feature map: the program of docs/method.md, solved.

    `inputs` is a tensor or array (batch, ...) with `labels` (batch,) beside it, or an iterable of batches or of pairs
    (inputs, labels). Without labels the model's own predictions are used.

    * `loss_weight`: λ, what the softmax term counts against sparsity.
    * `input_radius`: ε, half width of the box around each input from which the bounds come.
    * `objective`: "published", as in the authors' code, or "paper", as printed; `rescale`: c of the sparsity term.
    * `integer`: False relaxes the gates.
    * `by_class`: one program per class; the scores are averaged, `scores.parts` keeps them.
    * `solver`: "highs", or "cvxpy:NAME", which gets the literal program with every activation and gate.
    * `time_limit` in seconds, `gap`: when to stop. Ctrl-C stops too. Both leave the best scores so far.
    * `ignore`: names of layers that get no scores. `progress` is called with every `Step`.
    """
    settings = Settings(
        loss_weight=loss_weight,
        input_radius=input_radius,
        objective=objective,
        rescale=rescale,
        integer=integer,
        by_class=by_class,
        solver=solver,
        time_limit=time_limit,
        gap=gap,
        threads=threads,
        seed=seed,
        ignore=(ignore,) if isinstance(ignore, str) else tuple(ignore),
    )
    started = time.monotonic()
    found = find_solver(settings.solver)
    batch = gather_batch(inputs, labels)
    network = read_network(model, torch.from_numpy(batch.inputs), ignore=settings.ignore)
    if not network.scored:
        raise InvalidInputError(f"the network has nothing to score:\n{network}")
    if batch.labels is not None:
        check_classes(batch.labels, network.class_count)
    logits = run_to_logits(model, batch.inputs)
    task = _Task(network, settings, found, progress or ignore_progress, labelled=batch.labels is not None)
    points = _Points(batch.inputs, logits.argmax(axis=1) if batch.labels is None else batch.labels, logits)
    if by_class:
        return task.score_by_class(points, started)
    return task.score_points(points, started, time_limit - (time.monotonic() - started))[0]


@dataclass(frozen=True)
class _Points:
    """Data points with their labels and the model's own logits."""

    inputs: Floats
    labels: Ints
    logits: Floats

    def of_class(self, label: int) -> _Points:
        chosen = self.labels == label
        return _Points(self.inputs[chosen], self.labels[chosen], self.logits[chosen])


@dataclass(frozen=True)
class _Task:
    """What all programs of one call have in common."""

    network: Network
    settings: Settings
    solver: Solver
    report: Callable[[Step], None]
    labelled: bool

    def score_by_class(self, points: _Points, started: float) -> Scores:
        """One program per class with an equal share of the time left. Ctrl-C keeps the classes done so far."""
        classes = np.unique(points.labels).tolist()
        parts: list[Scores] = []
        for done, label in enumerate(classes):
            now = time.monotonic()
            share = (self.settings.time_limit - (now - started)) / (len(classes) - done)
            try:
                part, interrupted = self.score_points(points.of_class(label), now, share)
            except KeyboardInterrupt:
                if not parts:
                    raise
                break
            parts.append(part)
            if interrupted:
                break
        notes = (
            () if len(parts) == len(classes) else (f"interrupted: {len(parts)} of {len(classes)} classes averaged",)
        )
        return average_scores(parts, settings=self._record(points), seconds=time.monotonic() - started, notes=notes)

    def score_points(self, points: _Points, started: float, seconds: float) -> tuple[Scores, bool]:
        """The scores, and whether the search was interrupted by the user."""
        settings, network = self.settings, self.network
        bounds = bound_network(network, points.inputs, radius=settings.input_radius)
        objective = Objective(settings.objective, settings.loss_weight, settings.rescale)
        encode = encode_paper if Capability.SOURCES in self.solver.capabilities else encode_literal
        program = encode(network, bounds, points.labels, objective, integer=settings.integer)
        limits = Limits(max(seconds, 0.0), settings.gap, settings.threads, settings.seed)
        assert program.start is not None
        logit_error = float(np.abs(program.term.logits(program.start) - points.logits).max())
        solution = self.solver.solve(program, limits, self.report)
        if solution.point is None:
            raise SolverError(f"{self.solver.name}: {solution.status.sentence}")
        per_unit = np.clip(solution.point[program.blocks["score"]].round(SCORE_DECIMALS), 0.0, 1.0)
        scores = Scores(
            values_by_layer={layer.name: per_unit[layer.units] for layer in network.scored},
            layers=network.layers,
            groups=network.groups,
            holds=network.holds,
            fingerprint=network.fingerprint,
            status=solution.status,
            objective=solution.objective,
            bound=solution.bound,
            gap=solution.gap,
            seconds=time.monotonic() - started,
            settings=self._record(points),
            history=solution.history,
            sizes=solution.sizes,
            logit_error=logit_error,
            notes=network.notes,
        )
        return scores, solution.interrupted

    def _record(self, points: _Points) -> dict[str, Any]:
        return {
            **self.settings.to_dict(),
            "labels": points.labels.tolist(),
            "labels_from": "user" if self.labelled else "model",
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("critical_neurons", "torch", "numpy", "scipy", "highspy")},
            },
        }
