"""Rules: scores to plan, by threshold or by the share of units, parameters or multiply-adds kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np

from critical_neurons.core.budget import Budget, Scope
from critical_neurons.core.costs import count_cost, count_new_biases
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import Bools, Floats, Group, Ints, Layer, Measure, Structure
from critical_neurons.errors import InvalidSettingError

Threshold: TypeAlias = float | Mapping[str, float] | Literal["mean"]

ROUNDING = 1e-9
"""Added to a share times a count before it is cut down, so that 0.29 of 100 units are 29."""

KEPT = "kept, as asked"


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
    """Keep the units that score high, as `cn.plan` says.

    `biases_added`: layers without a bias count as with one, which refitting may give them; so they do for scores that
    a search for refitting found.
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
    check_counts(min_units, round_to)
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


def keep_within(structure: Structure, per_unit: Floats, budget: Budget, *, biases_added: bool) -> Bools:
    """What a budget leaves of the units with the highest values; with a last entry for NO_UNIT."""
    wanted = budget.measure, budget.share
    return _choose(structure, per_unit, wanted, budget.scope, 1, 1, (), biases_added)[0]


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
    """Which units stay, why for every layer, and by what rule."""
    name, value = wanted
    groups = _list_groups(structure, per_unit, keep, min_units)
    match name:
        case "threshold":
            rule = _by_threshold(groups, structure, value)
        case "units":
            rule = _by_share(groups, value, scope)
        case "params" | "macs" | "latency" as measure:
            try:  # multiples for all layers
                whole = _list_groups(structure, per_unit, keep, max(min_units, round_to))
                rule = _by_cost(whole, structure, measure, value, round_to, biases_added=biases_added)
                groups = whole
            except InvalidSettingError:
                rule = _by_cost(groups, structure, measure, value, round_to, biases_added=biases_added)
        case _:
            raise InvalidSettingError(f"plan: the budget of these scores is of {name!r}, which is not known here.")
    stays = np.ones(structure.unit_count + 1, dtype=bool)  # the last entry answers for NO_UNIT
    reasons: dict[str, str] = {}
    for group in groups:
        if group.whole:
            reasons |= dict.fromkeys(group.layers, KEPT)
            continue
        count, reason = (
            rule.counts.get(group, len(group.values)),
            rule.reasons.get(group, "no threshold given for it"),
        )
        rounded = _round(count, group, round_to, up=rule.rounds_up)
        if rounded != count:
            reason += f"; {count} made {rounded} by rounding or the minimum"
        stays[group.units] = group.choose(rounded)
        reasons |= dict.fromkeys(group.layers, reason)
    return stays, reasons, rule.description


@dataclass(frozen=True, eq=False)
class _Group:
    """A group of units and their values; `least` of them stay, all of them where it is to be left `whole`."""

    group: Group
    values: Floats
    least: int
    whole: bool

    @property
    def layers(self) -> tuple[str, ...]:
        return self.group.layers

    @property
    def units(self) -> Ints:
        return self.group.units

    @property
    def blocks(self) -> int:
        return self.group.blocks

    def choose(self, count: int) -> Bools:
        return self.group.choose(self.values, count)


@dataclass(frozen=True)
class _Rule:
    """How many units each group keeps, before rounding, and why."""

    description: str
    counts: Mapping[_Group, int]
    reasons: Mapping[_Group, str]
    rounds_up: bool


def _list_groups(structure: Structure, per_unit: Floats, keep: Collection[str], min_units: int) -> list[_Group]:
    groups = []
    for group in structure.groups:
        whole = not set(group.layers).isdisjoint(keep)
        least = group.blocks * math.ceil(max(min_units, group.least) / group.blocks)
        least = len(group) if whole else min(least, len(group))
        groups.append(_Group(group, per_unit[group.units], least, whole))
    return groups


def check_counts(min_units: int, round_to: int) -> None:
    for setting, number in (("min_units", min_units), ("round_to", round_to)):
        if not isinstance(number, int | np.integer) or number < 1:
            raise InvalidSettingError(f"plan: {setting}={number!r}. Accepted: a whole number of at least 1.")


def check_keep(keep: str | Collection[str], known: Iterable[Layer]) -> tuple[str, ...]:
    """The names of the layers to keep, one or several, in the order of those that are known."""
    names = (keep,) if isinstance(keep, str) else keep
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise InvalidSettingError(f"plan: keep={keep!r}. Accepted: names of layers.")
    layers = [layer.name for layer in known]
    unknown = sorted(set(names) - set(layers))
    if unknown:
        raise InvalidSettingError(f"plan: keep: no layer {', '.join(unknown)}. Layers: {', '.join(layers)}.")
    return tuple(name for name in layers if name in names)


def _by_threshold(groups: list[_Group], structure: Structure, threshold: Threshold) -> _Rule:
    limits: dict[_Group, float] = {}
    for group in groups:
        given = _threshold(group, structure, threshold)
        if given is not None:
            limits[group] = given
    return _Rule(
        "score below the layer's own threshold removed"
        if isinstance(threshold, Mapping)
        else f"score < {threshold} removed",
        {group: int((group.values >= limit).sum()) for group, limit in limits.items()},
        {group: f"score < {limit:.4g} removed" for group, limit in limits.items()},
        rounds_up=True,
    )


def _threshold(group: _Group, structure: Structure, threshold: Threshold) -> float | None:
    """The threshold of a group; of layers that share their units the lowest given counts."""
    if isinstance(threshold, str):
        if threshold != "mean":
            raise InvalidSettingError(f"plan: threshold={threshold!r}. Accepted: a number, a mapping, or 'mean'.")
        return float(group.values.mean())
    if isinstance(threshold, Mapping):
        known = [layer.name for layer in structure.removable]
        unknown = sorted(set(threshold) - set(known))
        if unknown:
            raise InvalidSettingError(f"plan: no scores for {', '.join(unknown)}. Scored layers: {', '.join(known)}.")
        given = [threshold[name] for name in group.layers if name in threshold]
    else:
        given = [threshold]
    for limit in given:
        if isinstance(limit, bool) or not isinstance(limit, Real) or not math.isfinite(limit):
            place = ", ".join(group.layers)
            raise InvalidSettingError(f"plan: the threshold of {place} is {limit!r}. Accepted: a finite number.")
    return min(given, default=None)


def _by_share(groups: list[_Group], share: float, scope: Scope) -> _Rule:
    if not isinstance(share, Real) or not 0 < share <= 1:
        raise InvalidSettingError(f"plan: units={share!r}. Accepted: a share above 0 and up to 1.")
    match scope:
        case "layer":
            counts = {group: math.floor(share * len(group.values) + ROUNDING) for group in groups}
        case "global":
            counts = _count_globally(groups, share)
            reached = sum(counts.values()) / sum(len(group.values) for group in groups)
            if any(group.whole for group in groups) and reached > share + ROUNDING:
                raise _out_of_reach("units", share, reached, groups)
        case _:
            raise InvalidSettingError(f"plan: scope={scope!r}. Accepted: 'layer', 'global'.")
    description = f"at most {share:.4g} of the units kept, {'by layer' if scope == 'layer' else 'overall'}"
    return _Rule(description, counts, dict.fromkeys(counts, description), rounds_up=False)


def _by_cost(
    groups: list[_Group], structure: Structure, measure: Measure, share: float, round_to: int, *, biases_added: bool
) -> _Rule:
    """The most of the highest-scored units of all layers whose cost is within the share."""
    if not isinstance(share, Real) or not 0 < share <= 1:
        raise InvalidSettingError(f"plan: {measure}={share!r}. Accepted: a share above 0 and up to 1.")
    total = structure.unit_count

    def keep(count: int) -> dict[_Group, int]:
        counts = _count_globally(groups, count / total)
        return {group: _round(wanted, group, round_to, up=False) for group, wanted in counts.items()}

    def cost(counts: Mapping[_Group, int]) -> float:
        kept = np.ones(total + 1)
        for group, count in counts.items():
            kept[group.units] = group.choose(count)
        added = count_new_biases(structure.wirings, kept, everywhere=biases_added) if measure == "params" else 0.0
        return count_cost(structure, kept, measure) + added

    whole = count_cost(structure, np.ones(total + 1), measure)
    limit = share * whole + ROUNDING
    least, most = 0, total
    if cost(keep(0)) > limit:
        raise _out_of_reach(measure, share, cost(keep(0)) / whole, groups)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if cost(keep(middle)) <= limit else (least, middle)
    counts = keep(most if cost(keep(most)) <= limit else least)
    counts = _fill(counts, round_to, lambda further: cost(further) <= limit)
    reached = f"at most {share:.4g} of the {measure} kept ({cost(counts) / whole:.4g})"
    return _Rule(reached, counts, dict.fromkeys(counts, reached), rounds_up=False)


def _fill(
    counts: Mapping[_Group, int], round_to: int, fits: Callable[[Mapping[_Group, int]], bool]
) -> dict[_Group, int]:
    """Further units, the highest-scored that fit first: where a large unit stopped the count, small ones may not."""
    filled, ranked = dict(counts), {group: np.sort(group.values)[::-1] for group in counts}
    offers: dict[_Group, int] = {}

    def offer(group: _Group) -> None:
        step = math.lcm(round_to, group.blocks)
        count = step * (filled[group] // step + 1)
        if count <= len(group.values):
            offers[group] = count

    for group in filled:
        offer(group)
    while offers:
        group = max(offers, key=lambda group: float(ranked[group][filled[group] : offers[group]].mean()))
        further = filled | {group: offers.pop(group)}
        if fits(further):
            filled = further
            offer(group)
    return filled


def _out_of_reach(measure: Measure, share: float, least: float, groups: list[_Group]) -> InvalidSettingError:
    whole = [name for group in groups if group.whole for name in group.layers]
    kept = f" and {', '.join(whole)} {KEPT}," if whole else ""
    return InvalidSettingError(
        f"plan: {measure} cannot fall to {share:.4g}; with the fewest units{kept} they are {least:.4g}."
    )


def _count_globally(groups: list[_Group], share: float) -> dict[_Group, int]:
    """The best of all units together, once every group has its minimum."""
    owner = np.repeat(np.arange(len(groups)), [len(group.values) for group in groups])
    everything = np.concatenate([group.values for group in groups])
    secured = np.concatenate([group.choose(group.least) for group in groups])
    count = max(int(secured.sum()), math.floor(share * len(owner) + ROUNDING))
    best = np.lexsort((np.arange(len(owner)), -everything, ~secured))[:count]
    return dict(zip(groups, np.bincount(owner[best], minlength=len(groups)).tolist(), strict=True))


def _round(count: int, group: _Group, round_to: int, *, up: bool) -> int:
    """The next multiple of `round_to` and of the blocks, but at least the minimum, and never more than all.

    A share that leaves no room for `round_to` is kept to all the same; the blocks of a grouped convolution must be.
    """
    step = math.lcm(round_to, group.blocks)
    rounded = step * (math.ceil(count / step) if up else count // step)
    if rounded < group.least:
        step = step if up else group.blocks
        rounded = step * math.ceil(max(group.least, 0 if up else count - count % group.blocks) / step)
    return min(len(group.values), rounded)


def _provenance(scores: Scores) -> dict[str, Any]:
    return {
        "status": scores.status.value,
        "objective": scores.objective,
        "bound": scores.bound,
        "gap": scores.gap,
        "settings": scores.plain_settings,
    }
