"""Plan rules: scores to plan, by threshold or by the share of units, parameters or multiply-adds kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np

from critical_neurons.core.budget import Budget, Scope
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import Bools, Floats, Layer, Structure
from critical_neurons.errors import InvalidSettingError
from critical_neurons.selection.group_counts import (
    KEPT,
    ROUNDING,
    Threshold,
    count_by_cost,
    count_by_share,
    count_by_threshold,
    list_groups,
    round_count,
)


def select_units(
    scores: Scores,
    *,
    threshold: Threshold | None = None,
    units: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    scope: Scope = "layer",
    min_units: int = 1,
    round_to: int = 1,
    keep: str | Collection[str] = (),
    biases_added: bool = False,
) -> Plan:
    """Keep the units with the highest scores; for the settings see `cn.plan`.

    `biases_added`: count a bias for layers without one, since refitting may add it. Always so for scores of a search
    that planned for refitting.
    """
    biases_added = biases_added or scores.compensate != "none"
    given: dict[str, Any] = {"threshold": threshold, "units": units, "params": params, "macs": macs}
    chosen = {name: value for name, value in given.items() if value is not None}
    if not chosen and scores.budget is not None:
        chosen, scope = {scores.budget.measure: scores.budget.share}, scores.budget.scope
    if len(chosen) != 1:
        raise InvalidSettingError(
            "plan: give one of threshold=, units=, params= and macs=; none of them only for scores with a budget."
        )
    if scope not in ("layer", "global"):
        raise InvalidSettingError(f"plan: scope={scope!r}. Accepted: 'layer', 'global'.")
    check_counts(min_units=min_units, round_to=round_to)
    names = check_keep(keep, scores.layers)
    (name, value), *_ = chosen.items()
    stays, reasons, description = _choose(
        scores.structure, scores.per_unit, (name, value), scope, min_units, round_to, names, biases_added
    )
    if names:
        description = f"{description}; {', '.join(names)} {KEPT}"
    if name == "units" and not names and stays[:-1].mean() > value + ROUNDING:
        description += f" ({stays[:-1].mean():.4g} in fact: some layers are at their minimum)"
    if not scores.span.whole:
        description = description.replace(f"of the {name} kept", f"of the {name} of the span kept")
    return Plan(
        scores.structure, stays, reasons, description, _provenance(scores), scores.span, frozenset(scores.inputs)
    )


def keep_within(
    structure: Structure, per_unit: Floats, budget: Budget, *, biases_added: bool, round_to: int = 1
) -> Bools:
    """The units with the highest values that a budget allows; with a last entry for NO_UNIT."""
    wanted = budget.measure, budget.share
    return _choose(structure, per_unit, wanted, budget.scope, 1, round_to, (), biases_added)[0]


def _choose(
    structure: Structure,
    per_unit: Floats,
    wanted: tuple[str, Any],
    scope: Scope,
    min_units: int,
    round_to: int,
    keep: Collection[str],
    biases_added: bool,
) -> tuple[Bools, dict[str, str], str]:
    """Which units stay, the reason for every layer, and the rule in words."""
    name, value = wanted
    groups = list_groups(structure, per_unit, keep, min_units)
    match name:
        case "threshold":
            rule = count_by_threshold(groups, structure, value)
        case "units":
            rule = count_by_share(groups, value, scope)
        case "params" | "macs" | "latency" as measure:
            try:  # first with multiples of `round_to` in all layers
                whole = list_groups(structure, per_unit, keep, max(min_units, round_to))
                rule = count_by_cost(whole, structure, measure, value, round_to, biases_added=biases_added)
                groups = whole
            except InvalidSettingError:
                rule = count_by_cost(groups, structure, measure, value, round_to, biases_added=biases_added)
        case _:
            raise InvalidSettingError(f"plan: the budget of these scores is in {name!r}, which is unknown.")
    stays = np.ones(structure.unit_count + 1, dtype=bool)  # the last entry is that of NO_UNIT
    reasons: dict[str, str] = {}
    for group in groups:
        if group.whole:
            reasons |= dict.fromkeys(group.layers, KEPT)
            continue
        count, reason = (
            rule.counts.get(group, len(group.values)),
            rule.reasons.get(group, "no threshold given for it"),
        )
        rounded = round_count(count, group, round_to, up=rule.rounds_up)
        if rounded != count:
            reason += f"; {count} made {rounded} by rounding or the minimum"
        stays[group.units] = group.choose(rounded)
        reasons |= dict.fromkeys(group.layers, reason)
    return stays, reasons, rule.description


def check_counts(**settings: int) -> None:
    for setting, number in settings.items():
        if not isinstance(number, int | np.integer) or number < 1:
            raise InvalidSettingError(f"{setting}={number!r}. Accepted: a whole number of at least 1.")


def check_keep(keep: str | Collection[str], known: Iterable[Layer]) -> tuple[str, ...]:
    """The names of the layers to keep, in the order of the known layers."""
    names = (keep,) if isinstance(keep, str) else keep
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidSettingError(f"plan: keep={keep!r}. Accepted: names of layers.")
    layers = [layer.name for layer in known]
    unknown = sorted(set(names) - set(layers))
    if unknown:
        raise InvalidSettingError(f"plan: keep: no layer {', '.join(unknown)}. Layers: {', '.join(layers)}.")
    return tuple(name for name in layers if name in names)


def _provenance(scores: Scores) -> dict[str, Any]:
    return {
        "status": scores.status.value,
        "objective": scores.objective,
        "bound": scores.bound,
        "gap": scores.gap,
        "settings": scores.plain_settings,
    }
