"""Deep: a whole VGG-16 or ResNet-20 in one program, and its scores compared with other ways to choose units."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

MACS = 0.5
CALIBRATION, MEASURED = 1000, 2000
SECONDS = 900.0
"""Time limit of a program, processor time: on a busy machine wall-clock time depends on the other work."""

LONGEST = 2400.0
"""The same in wall-clock time."""

PROGRAMS: dict[str, dict[str, Any]] = {
    "paper": {"integer": False},
    "linearised": {"formulation": "linearised", "budget": {"macs": MACS}},
}
SEARCH, NORMS = "cn.search", "L2 norms"
"""What the programs are compared with: the search of this package, and magnitude pruning."""

CHOICES = (*PROGRAMS, SEARCH, NORMS)


def describe_program(network: str, program: str) -> dict[str, Any]:
    return {"network": network, "program": PROGRAMS[program], "time_limit": SECONDS, "images": 10}


def describe_worth(network: str, choice: str) -> dict[str, Any]:
    images = {"calibration": CALIBRATION, "measured": MEASURED}
    return {"network": network, "choice": choice, "macs": MACS, **images}


def score(network: str, program: str, *, data: Path, weights: Path, folder: Path) -> dict[str, Any]:
    """Solve the program and measure its cost. Its scores are saved in the folder, for `judge`."""
    import critical_neurons as cn
    from critical_neurons_reproduction.score_settings import read_score_settings
    from preferring import choose_correct
    from timing import measure

    subject, _ = _load(network, data, weights, folder)
    rows = choose_correct(subject)
    settings = read_score_settings({**PROGRAMS[program], "time_limit": LONGEST})
    settings["progress"] = partial(_stop_late, time.process_time() + SECONDS)
    work = partial(cn.score, subject.model, subject.inputs[rows], subject.labels[rows], **settings)
    scores, taken = measure(work)
    scores.save(_name_scores(folder, network, program))
    return {
        **taken,
        "objective": scores.objective,
        "bound": scores.bound,
        "gap": scores.gap,
        "status": scores.status.value,
        "sizes": dict(scores.sizes),
        "mean_score": float(scores.per_unit.mean()),
        "units": len(scores.per_unit),
        "below_half": int((scores.per_unit < 0.5).sum()),
    }


def _stop_late(deadline: float, step: Any) -> None:
    """Stop the search as Ctrl-C does, which keeps the best scores so far."""
    if time.process_time() > deadline:
        raise KeyboardInterrupt


def judge(network: str, choice: str, *, data: Path, weights: Path, folder: Path) -> dict[str, Any]:
    """Validation accuracy at half the MACs, with and without refitting; seconds to choose the units."""
    import quality
    from critical_neurons.removal.metrics import measure_accuracy

    subject, part = _load(network, data, weights, folder)
    judged = quality.Judge(subject, part)
    accuracy, seconds = {}, {}
    for compensate in quality.COMPENSATIONS:
        plan, seconds[compensate] = quality.clock(partial(_choose, network, choice, subject, compensate, folder))
        accuracy[compensate] = judged.measure(plan, compensate)
    before = measure_accuracy(subject.model, part.inputs, part.labels)
    return {"before": before, "accuracy": accuracy, "seconds_of_choosing": seconds}


def _choose(network: str, choice: str, subject: Any, compensate: str, folder: Path) -> Any:
    import critical_neurons as cn
    import quality
    from preferring import prefer

    if choice == SEARCH:
        return cn.plan(cn.search(subject.model, subject.inputs, macs=MACS, compensate=compensate, seed=0))
    scores = cn.Scores.load(_name_scores(folder, network, choice if choice in PROGRAMS else "linearised"))
    if choice == NORMS:
        scores = quality.frame_values(scores, prefer("L2", subject))
    return cn.plan(scores, macs=MACS)


def _load(network: str, data: Path, weights: Path, folder: Path) -> tuple[Any, Any]:
    """The network with its calibration images, and the validation images."""
    import quality
    from critical_neurons.io.models import load_model
    from critical_neurons_reproduction.experiments.workspace import Runs

    case = next(case for case in quality.CASES if case.network == network)
    images = quality.load_images(case, Runs(folder, data))
    subject = quality.build_subject(case, load_model(network, weights), images.training, 0, CALIBRATION)
    return subject, quality.choose_part(images, {"part": "validation", "measured": MEASURED})


def _name_scores(folder: Path, network: str, program: str) -> Path:
    return folder / f"{network}-{program}.json"
