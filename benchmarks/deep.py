"""Deep: a whole VGG-16 or ResNet-20 in one program, and what its scores are worth beside other choices."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

MACS = 0.5
CALIBRATION, MEASURED = 1000, 2000
SECONDS = 900.0
"""Of the clock: what a program may take."""

PROGRAMS: dict[str, dict[str, Any]] = {
    "paper": {"integer": False},
    "linearised": {"formulation": "linearised", "budget": {"macs": MACS}},
}
OTHERS = "others"
CHOICES = (*PROGRAMS, OTHERS)
SEARCH, NORMS = "cn.search", "L2 norms"
"""The quality benchmark's winner, and what costs nothing."""


def describe(network: str, choice: str) -> dict[str, Any]:
    return {
        "network": network,
        "choice": choice,
        "program": PROGRAMS.get(choice),
        "time_limit": SECONDS,
        "images": 10 if choice in PROGRAMS else CALIBRATION,
        "macs": MACS,
        "calibration": CALIBRATION,
        "measured": MEASURED,
    }


def run(network: str, choice: str, data: Path, weights: Path, folder: Path) -> dict[str, Any]:
    """Scores, and the accuracy left at half the multiply-adds, refitted and not, on validation images."""
    import critical_neurons as cn
    import quality
    from critical_neurons.experiments.reproducing.runs import Runs
    from critical_neurons.loading import load_model
    from critical_neurons.measuring import measure_accuracy
    from preferring import choose_correct, prefer
    from timing import measure

    case = next(case for case in quality.CASES if case.network == network)
    images = quality.load_images(case, Runs(folder, data))
    subject = quality.build_subject(case, load_model(network, weights), images.training, 0, CALIBRATION)
    part = quality.choose_part(images, {"part": "validation", "measured": MEASURED})
    del images  # what is measured is the program's memory, not that of the data
    judge = quality.Judge(subject, part)
    result: dict[str, Any] = {}
    plans: dict[str, dict[str, cn.Plan]] = {}
    if choice in PROGRAMS:
        rows = choose_correct(subject)
        settings = {**PROGRAMS[choice], "time_limit": SECONDS, "threads": 1}
        work = partial(cn.score, subject.model, subject.inputs[rows], subject.labels[rows], **settings)
        scores, result = measure(work)
        result |= {
            "objective": scores.objective,
            "bound": scores.bound,
            "gap": scores.gap,
            "status": scores.status.value,
            "sizes": dict(scores.sizes),
            "mean_score": float(scores.per_unit.mean()),
            "units": len(scores.per_unit),
            "below_half": int((scores.per_unit < 0.5).sum()),
        }
        plans[choice] = dict.fromkeys(quality.COMPENSATIONS, cn.plan(scores, macs=MACS))
    else:
        found = {}
        for compensate in quality.COMPENSATIONS:
            work = partial(cn.search, subject.model, subject.inputs, macs=MACS, compensate=compensate, seed=0)
            found[compensate], result[compensate] = measure(work)
        plans[SEARCH] = {compensate: cn.plan(scores) for compensate, scores in found.items()}
        norms = quality.frame_values(found["none"], prefer("L2", subject))
        plans[NORMS] = dict.fromkeys(quality.COMPENSATIONS, cn.plan(norms, macs=MACS))
    return {
        **result,
        "before": measure_accuracy(subject.model, part.inputs, part.labels),
        "accuracy": {
            name: {compensate: judge.measure(plan, compensate) for compensate, plan in mine.items()}
            for name, mine in plans.items()
        },
    }
