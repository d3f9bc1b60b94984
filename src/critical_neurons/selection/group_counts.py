"""Group counts: how many units every group keeps, by threshold, by share or by cost, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Literal, TypeAlias

import numpy as np

from critical_neurons.core.budget import Scope
from critical_neurons.core.costs import CostModel, count_new_biases
from critical_neurons.core.structure import Bools, Floats, Group, Ints, Measure, Structure
from critical_neurons.errors import InvalidSettingError

Threshold: TypeAlias = float | Mapping[str, float] | Literal["mean"]

ROUNDING = 1e-9
"""Added before rounding down, so that 0.29 of 100 units are 29."""

KEPT = "kept, as asked"


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """A group and the values of its units; at least `least` units stay, all of them if it is kept `whole`."""

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
class CountRule:
    """How many units each group keeps, before rounding, and why."""

    description: str
    counts: Mapping[ScoredGroup, int]
    reasons: Mapping[ScoredGroup, str]
    rounds_up: bool


def list_groups(structure: Structure, per_unit: Floats, keep: Collection[str], min_units: int) -> list[ScoredGroup]:
    groups = []
    for group in structure.groups:
        whole = not set(group.layers).isdisjoint(keep)
        least = group.blocks * math.ceil(max(min_units, group.least) / group.blocks)
        least = len(group) if whole else min(least, len(group))
        groups.append(ScoredGroup(group, per_unit[group.units], least, whole))
    return groups


def count_by_threshold(groups: list[ScoredGroup], structure: Structure, threshold: Threshold) -> CountRule:
    limits: dict[ScoredGroup, float] = {}
    for group in groups:
        given = _threshold(group, structure, threshold)
        if given is not None:
            limits[group] = given
    return CountRule(
        "score below the layer's own threshold removed"
        if isinstance(threshold, Mapping)
        else f"score < {threshold} removed",
        {group: int((group.values >= limit).sum()) for group, limit in limits.items()},
        {group: f"score < {limit:.4g} removed" for group, limit in limits.items()},
        rounds_up=True,
    )


def _threshold(group: ScoredGroup, structure: Structure, threshold: Threshold) -> float | None:
    """The threshold of a group: the lowest of those given for its layers."""
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


def count_by_share(groups: list[ScoredGroup], share: float, scope: Scope) -> CountRule:
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
    return CountRule(description, counts, dict.fromkeys(counts, description), rounds_up=False)


def count_by_cost(
    groups: list[ScoredGroup],
    structure: Structure,
    measure: Measure,
    share: float,
    round_to: int,
    *,
    biases_added: bool,
) -> CountRule:
    """As many of the highest-scored units of all layers as the budget allows."""
    if not isinstance(share, Real) or not 0 < share <= 1:
        raise InvalidSettingError(f"plan: {measure}={share!r}. Accepted: a share above 0 and up to 1.")
    total, model = structure.unit_count, CostModel(structure, measure)

    def keep(count: int) -> dict[ScoredGroup, int]:
        counts = _count_globally(groups, count / total)
        return {group: round_count(wanted, group, round_to, up=False) for group, wanted in counts.items()}

    def cost(counts: Mapping[ScoredGroup, int]) -> float:
        kept = np.ones(total + 1)
        for group, count in counts.items():
            kept[group.units] = group.choose(count)
        added = count_new_biases(structure.wirings, kept, everywhere=biases_added) if measure == "params" else 0.0
        return model.count(kept) + added

    whole = model.count(np.ones(total + 1))
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
    return CountRule(reached, counts, dict.fromkeys(counts, reached), rounds_up=False)


def _fill(
    counts: Mapping[ScoredGroup, int], round_to: int, fits: Callable[[Mapping[ScoredGroup, int]], bool]
) -> dict[ScoredGroup, int]:
    """Add units that still fit, highest scores first: where an expensive unit did not fit, cheaper ones may."""
    filled, ranked = dict(counts), {group: np.sort(group.values)[::-1] for group in counts}
    offers: dict[ScoredGroup, int] = {}

    def offer(group: ScoredGroup) -> None:
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


def _out_of_reach(measure: Measure, share: float, least: float, groups: list[ScoredGroup]) -> InvalidSettingError:
    whole = [name for group in groups if group.whole for name in group.layers]
    kept = f" and {', '.join(whole)} {KEPT}," if whole else ""
    return InvalidSettingError(
        f"plan: {measure} cannot fall to {share:.4g}; with the fewest units{kept} they are {least:.4g}."
    )


def _count_globally(groups: list[ScoredGroup], share: float) -> dict[ScoredGroup, int]:
    """The best of all units together, once every group has its minimum."""
    owner = np.repeat(np.arange(len(groups)), [len(group.values) for group in groups])
    everything = np.concatenate([group.values for group in groups])
    secured = np.concatenate([group.choose(group.least) for group in groups])
    count = max(int(secured.sum()), math.floor(share * len(owner) + ROUNDING))
    best = np.lexsort((np.arange(len(owner)), -everything, ~secured))[:count]
    return dict(zip(groups, np.bincount(owner[best], minlength=len(groups)).tolist(), strict=True))


def round_count(count: int, group: ScoredGroup, round_to: int, *, up: bool) -> int:
    """The next multiple of `round_to` and of the number of blocks, between the minimum and all units.

    Where the budget leaves no room for `round_to`, only the blocks of a grouped convolution count: they stay equal.
    """
    step = math.lcm(round_to, group.blocks)
    rounded = step * (math.ceil(count / step) if up else count // step)
    if rounded < group.least:
        step = step if up else group.blocks
        rounded = step * math.ceil(max(group.least, 0 if up else count - count % group.blocks) / step)
    return min(len(group.values), rounded)
