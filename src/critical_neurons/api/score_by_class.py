"""Score by class: one program per class, on any number of workers, and the average of their scores."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial

import numpy as np

from critical_neurons.api.score_task import INTERRUPTED, DataPoints, ScoreTask
from critical_neurons.core.formulation import (
    ByClass,
)
from critical_neurons.core.scores import Scores, average_scores
from critical_neurons.core.solution import ClassStep, Step
from critical_neurons.errors import (
    WorkersError,
)
from critical_neurons.parallel import SendMessage, Task, open_executor
from critical_neurons.solvers import ignore_progress


def score_by_class(task: ScoreTask, by_class: ByClass, points: DataPoints, started: float) -> tuple[Scores, bool]:
    """One program per class, each with an equal share of the remaining time. Ctrl-C and lost workers leave the
    classes finished so far."""
    classes = [int(label) for label in np.unique(points.labels)]
    earlier = by_class.earlier
    parts = {label: known for label in classes if (known := _find_earlier(task, earlier, points.of_class(label)))}
    missing = [label for label in classes if label not in parts]

    def on_message(label: str, step: Step) -> None:
        common = {each.name: getattr(step, each.name) for each in fields(Step)}
        task.report(ClassStep(**common, label=int(label), done=len(parts), classes=len(classes)))

    interrupted = False
    reasons: list[str] = []
    try:
        with open_executor(
            by_class.workers, most=len(missing), threads=task.solver.threads or 1, on_message=on_message
        ) as executor:

            def list_tasks() -> Iterator[tuple[str, Task]]:
                for begun, label in enumerate(missing):
                    rounds = math.ceil((len(missing) - begun) / executor.slots)
                    share = (started + task.solver.time_limit - time.monotonic()) / rounds
                    yield (
                        str(label),
                        partial(
                            _score_class,
                            replace(task, report=ignore_progress, by_class=ByClass()),
                            points.of_class(label),
                            share,
                        ),
                    )

            for done in executor.run(list_tasks()):
                if isinstance(done.error, WorkersError):
                    reasons.append(f"class {done.name}: {done.error}")
                    continue
                if done.error is not None:
                    raise done.error
                parts[int(done.name)], interrupted = done.result
                if interrupted:
                    break
    except (KeyboardInterrupt, WorkersError) as stop:
        if len(parts) == len(classes) - len(missing):  # nothing new was found
            raise
        interrupted = True
        reasons.extend([str(stop)] if isinstance(stop, WorkersError) else [])
    if not parts:
        raise WorkersError(" ".join(reasons))
    count = f"{INTERRUPTED}: {len(parts)} of {len(classes)} classes averaged"
    notes = () if len(parts) == len(classes) else ("; ".join([count, *reasons]),)
    seconds = time.monotonic() - started
    ordered = [parts[label] for label in classes if label in parts]
    return average_scores(ordered, settings=task.describe(points), seconds=seconds, notes=notes), interrupted


def _find_earlier(task: ScoreTask, earlier: Scores | None, points: DataPoints) -> Scores | None:
    """The scores of the same program, solved before without interruption."""
    if earlier is None:
        return None
    network, record, inputs = task.network, task.describe(points), tuple(points.digests.tolist())
    for part in earlier.parts:
        asked = part.fingerprint, part.span, part.settings, part.budget, part.inputs
        stopped = any(note.startswith(INTERRUPTED) for note in part.notes)
        if asked == (network.fingerprint, network.span, record, task.budget, inputs) and not stopped:
            return part
    return None


def _score_class(task: ScoreTask, points: DataPoints, seconds: float, send: SendMessage) -> tuple[Scores, bool]:
    now = time.monotonic()
    return replace(task, report=send).score_points(points, now, now + seconds)
