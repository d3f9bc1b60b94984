"""Course: how the units were found, by programs (bound and incumbent over time) or by a search."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

import numpy as np

from critical_neurons.core.curve import Curve
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.solution import Step
from critical_neurons.reports.content import ChoiceError, Course, CurveDot, Solved, TradeOff, Trials

MOST_STEPS = 400
"""Largest number of history steps shown; longer histories are thinned out evenly and keep the last step."""


def describe_course(scores: Scores | None, plan: Plan | None) -> Course | None:
    trials = None if plan is None else _read_trials(plan)
    if scores is None:
        return None if trials is None else Course("As few units as the accuracy allows.", trials=trials)
    search = scores.search_history
    costs = {} if search is None else {each.layers: each for each in search.costs}
    return Course(
        _summarise(scores),
        history=_thin(scores.history),
        search=None if search is None else replace(search, costs=()),  # shown with the choices
        programs=_list_programs(scores),
        choices=tuple(
            ChoiceError(each.layers, costs.get(each.layers), each.error, each.bound, each.gap)
            for each in scores.layer_choices
        ),
        trials=trials,
        notes=_list_notes(scores),
    )


def trade_off(curve: Curve) -> TradeOff:
    """The trade-off curve of a sweep with at least one point."""
    dots = []
    for point in curve.points:
        before, after, timed = point.comparison.before, point.comparison.after, point.seconds_per_input
        dots.append(
            CurveDot(
                point.method,
                point.share,
                after.macs / before.macs if before.macs else None,
                after.parameters / before.parameters if before.parameters else None,
                None if timed is None else timed[1] / timed[0],
                point.worth[1],
            )
        )
    return TradeOff(curve.measure, curve.points[0].worth[0], curve.points[0].comparison.before.accuracy, tuple(dots))


def _summarise(scores: Scores) -> str:
    if not scores.sizes:  # no program was solved
        reached = "" if scores.objective is None else f" The distance of the outputs is then {scores.objective:.4g}."
        return f"Searched for {scores.seconds:.1f} s.{reached}"
    solved = f"{len(scores.parts)} programs" if scores.parts else "One program"
    return f"{solved} solved in {scores.seconds:.1f} s. {scores.status.sentence}"


def _list_programs(scores: Scores) -> tuple[Solved, ...]:
    if not scores.sizes:
        return ()
    parts = [(f"program {place}", part) for place, part in enumerate(scores.parts, 1)] or [("program", scores)]
    return tuple(
        Solved(name, part.status.value, _finite(part.objective), _finite(part.bound), part.gap, part.seconds)
        for name, part in parts
    )


def _list_notes(scores: Scores) -> tuple[str, ...]:
    """The notes whose content the page does not show elsewhere."""
    shown = {str(each) for each in scores.layer_choices}
    notes = [note for note in scores.notes if note not in shown]
    notes += [str(each) for each in (scores.incumbent, scores.dual) if each is not None]
    return tuple(dict.fromkeys(notes))


def _read_trials(plan: Plan) -> Trials | None:
    drop = plan.provenance.get("drop", {})
    if not drop.get("trials"):
        return None
    points = sorted((each["share"], each["worth"]) for each in drop["trials"])
    return Trials(drop["before"], drop["max_drop"], tuple(points))


def _thin(history: tuple[Step, ...]) -> tuple[Step, ...]:
    places = np.linspace(0, len(history) - 1, min(len(history), MOST_STEPS)).round().astype(int)
    chosen = (history[place] for place in places)
    return tuple(replace(each, objective=_finite(each.objective), bound=_finite(each.bound)) for each in chosen)


def _finite(value: float | None) -> float | None:
    """A bound that is not known yet may be infinite, which JSON cannot express."""
    return value if value is not None and isfinite(value) else None
