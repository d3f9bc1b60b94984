"""Content assembly: the content of a report from a comparison, a plan, scores and a curve, whichever are given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from critical_neurons.core.comparison import Comparison, Measurement
from critical_neurons.core.costs import count_cost
from critical_neurons.core.curve import Curve
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import Measure
from critical_neurons.errors import InvalidSettingError, PlanMismatchError
from critical_neurons.reports.content import Answered, Content, Gain
from critical_neurons.reports.course import describe_course, trade_off
from critical_neurons.reports.diagram import find_rails, list_layers, list_strips
from critical_neurons.reports.provenance import list_facts

TITLE, SWEPT_TITLE = "A smaller network", "How small can it go"

MOST_CLASSES, MOST_CHANGES = 1000, 10_000
"""Largest numbers listed on a page, to limit its size."""

COUNTED: Mapping[str, Measure] = {"Multiply-adds": "macs", "Parameters": "params", "Units": "units"}


def assemble(
    *,
    comparison: Comparison | None = None,
    plan: Plan | None = None,
    scores: Scores | None = None,
    curve: Curve | None = None,
    title: str = TITLE,
    class_names: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    call: str = "",
) -> Content:
    """`files` are digests of files by name, `call` is the command that reproduces the report."""
    if comparison is None and plan is None and scores is None and curve is None:
        raise InvalidSettingError("report: nothing to report. Give a comparison, a plan, scores or a curve.")
    if plan is not None and scores is not None and plan.architecture != scores.fingerprint.architecture:
        raise PlanMismatchError(
            "report: the plan and the scores are of different networks. Give those that belong together."
        )
    structure = plan.structure if plan is not None else None if scores is None else scores.structure
    return Content(
        title=title,
        rule="" if plan is None else plan.rule,
        gains=list_gains(comparison) if comparison is not None else _count_gains(plan),
        measured=() if comparison is None else tuple(comparison.rows),
        measured_notes=() if comparison is None else comparison.notes,
        layers=() if structure is None else list_layers(structure, plan),
        rails=() if structure is None else find_rails(structure),
        strips=() if structure is None else list_strips(structure, scores, plan),
        course=describe_course(scores, plan),
        trade_off=None if curve is None or not curve.points else trade_off(curve),
        answered=None if comparison is None else list_answers(comparison),
        class_names=tuple(map(str, class_names)),
        facts=list_facts(structure, comparison, scores, plan, curve, files or {}),
        call=call,
    )


def list_gains(comparison: Comparison) -> tuple[Gain, ...]:
    """The main quantities, the most important first. Those that could not be measured are left out."""
    before, after = comparison.before, comparison.after
    gains = [
        Gain(f"Accuracy, {comparison.data} data", "share", before.accuracy, after.accuracy)
        if before.accuracy is not None and after.accuracy is not None
        else _relate(comparison),
        Gain("Multiply-adds", "count", before.macs, after.macs),
        Gain("Parameters", "count", before.parameters, after.parameters),
        Gain("Size on disk", "bytes", before.bytes_on_disk, after.bytes_on_disk),
        _find_latency(before, after),
        Gain("Peak activations", "bytes", before.peak_activation_bytes, after.peak_activation_bytes),
    ]
    return tuple(gain for gain in gains if gain is not None)


def list_answers(comparison: Comparison) -> Answered | None:
    """None unless the outputs are classes."""
    answers = comparison.answers
    if answers is None:
        return None
    by_change = sorted(answers.classes, key=lambda each: abs(each.after - each.before) / each.inputs, reverse=True)
    return Answered(
        comparison.inputs,
        comparison.data,
        len(answers.classes),
        tuple(sorted(by_change[:MOST_CLASSES], key=lambda each: each.label)),
        dict(Counter(each.fate for each in answers.changes)),
        answers.changes[:MOST_CHANGES],
    )


def _relate(comparison: Comparison) -> Gain | None:
    """If there are no accuracies: the agreement or the difference of the outputs."""
    if comparison.agreement is not None:
        return Gain("Same predictions", "share", None, comparison.agreement, "of the inputs get the same class")
    if comparison.difference is None:
        return None
    spread = "root mean square, of the spread of the outputs"
    return Gain("Difference of outputs", "share", None, comparison.difference, spread)


def _find_latency(before: Measurement, after: Measurement) -> Gain | None:
    """The first latency measured for both networks."""
    for first in before.latencies:
        second = after.latency(first.runtime, first.batch_size)
        if second is not None:
            size = "one input" if first.batch_size == 1 else f"{first.batch_size} inputs"
            return Gain(f"Time for {size}, {first.runtime}", "seconds", first.median, second.median)
    return None


def _count_gains(plan: Plan | None) -> tuple[Gain, ...]:
    """Without a comparison: the sizes after the plan, counted from the structure."""
    if plan is None:
        return ()
    kept = plan.stays.astype(np.float64)
    whole = np.ones_like(kept)
    counts = ((name, partial(count_cost, plan.structure, measure=measure)) for name, measure in COUNTED.items())
    return tuple(Gain(name, "count", round(count(whole)), round(count(kept))) for name, count in counts)
