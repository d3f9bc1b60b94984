"""Selecting: scores to plan, by threshold or by share of units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypeAlias

import numpy as np

from critical_neurons.errors import InvalidSettingError
from critical_neurons.network import Floats, Ints, Layer
from critical_neurons.plans import LayerPlan, Plan
from critical_neurons.scores import Scores

Threshold: TypeAlias = float | Mapping[str, float] | Literal["mean"]
Scope: TypeAlias = Literal["layer", "global"]

ROUNDING = 1e-9
"""Added to a share times a count before it is cut down, so that 0.29 of 100 units are 29."""


def select_units(
    scores: Scores,
    *,
    threshold: Threshold | None = None,
    units: float | None = None,
    scope: Scope = "layer",
    min_units: int = 1,
    round_to: int = 1,
) -> Plan:
    """Keep the units that score high.

    `threshold`: remove what scores strictly below it; one number, one per layer, or "mean", each layer's own mean.
    `units`: keep at most this share, the highest-scored, of every layer (`scope="layer"`) or of all units together
    (`scope="global"`). Every layer keeps `min_units`. The number kept is a multiple of `round_to`: rounded up under a
    threshold, down under a share. Among equal scores the unit with the smaller number stays.
    """
    if (threshold is None) == (units is None):
        raise InvalidSettingError("plan: give either threshold= or units=.")
    for name, value in (("min_units", min_units), ("round_to", round_to)):
        if not isinstance(value, int | np.integer) or value < 1:
            raise InvalidSettingError(f"plan: {name}={value!r}. Accepted: a whole number of at least 1.")
    if threshold is not None:
        rule = _by_threshold(scores, threshold, round_to)
    else:
        assert units is not None
        rule = _by_share(scores, units, scope, min_units, round_to)
    layers = tuple(_plan_layer(layer, scores, rule, min_units) for layer in scores.layers)
    return Plan(layers, rule.description, scores.fingerprint.architecture, _provenance(scores))


@dataclass(frozen=True)
class _Rule:
    """How many units each layer keeps by the rule alone and after rounding, and why."""

    description: str
    counts: Mapping[str, int]
    rounded: Mapping[str, int]
    reasons: Mapping[str, str]


def _by_threshold(scores: Scores, threshold: Threshold, round_to: int) -> _Rule:
    limits = _thresholds(scores, threshold)
    counts = {name: int((scores[name] >= limit).sum()) for name, limit in limits.items()}
    return _Rule(
        "score below the layer's own threshold removed"
        if isinstance(threshold, Mapping)
        else f"score < {threshold} removed",
        counts,
        {name: round_to * math.ceil(count / round_to) for name, count in counts.items()},
        {name: f"score < {limit:.4g} removed" for name, limit in limits.items()},
    )


def _by_share(scores: Scores, share: float, scope: Scope, min_units: int, round_to: int) -> _Rule:
    if not isinstance(share, Real) or not 0 < share <= 1:
        raise InvalidSettingError(f"plan: units={share!r}. Accepted: a share above 0 and up to 1.")
    match scope:
        case "layer":
            counts = {name: math.floor(share * len(values) + ROUNDING) for name, values in scores.items()}
        case "global":
            counts = _count_globally(scores, share, min_units)
        case _:
            raise InvalidSettingError(f"plan: scope={scope!r}. Accepted: 'layer', 'global'.")
    description = f"at most {share:.4g} of the units kept, {'by layer' if scope == 'layer' else 'overall'}"
    return _Rule(
        description,
        counts,
        {name: round_to * (count // round_to) for name, count in counts.items()},
        dict.fromkeys(counts, description),
    )


def _count_globally(scores: Scores, share: float, min_units: int) -> dict[str, int]:
    """The best of all units together, once every layer has its minimum."""
    names = list(scores)
    owner = np.repeat(np.arange(len(names)), [len(scores[name]) for name in names])
    everything = np.concatenate([scores[name] for name in names])
    secured = np.concatenate(
        [np.isin(np.arange(len(scores[name])), _highest(scores[name], min_units)) for name in names]
    )
    count = max(int(secured.sum()), math.floor(share * len(owner) + ROUNDING))
    best = np.lexsort((np.arange(len(owner)), -everything, ~secured))[:count]
    return dict(zip(names, np.bincount(owner[best], minlength=len(names)).tolist(), strict=True))


def _plan_layer(layer: Layer, scores: Scores, rule: _Rule, min_units: int) -> LayerPlan:
    if layer.name not in rule.counts:
        everything = np.arange(layer.size)
        return LayerPlan(
            layer.name, layer.size, everything, layer.reason or "no threshold given for it", layer.held_at
        )
    wanted = rule.counts[layer.name]
    count = min(layer.size, max(min_units, rule.rounded[layer.name]))
    reason = rule.reasons[layer.name]
    if count != wanted:
        reason += f"; {wanted} made {count} by rounding or the minimum"
    return LayerPlan(layer.name, layer.size, _highest(scores[layer.name], count), reason, layer.held_at)


def _highest(values: Floats, count: int) -> Ints:
    """The numbers of the highest values, ascending; among equals the smaller numbers."""
    return np.sort(np.argsort(-values, kind="stable")[:count])


def _thresholds(scores: Scores, threshold: Threshold) -> dict[str, float]:
    if isinstance(threshold, str):
        if threshold != "mean":
            raise InvalidSettingError(f"plan: threshold={threshold!r}. Accepted: a number, a mapping, or 'mean'.")
        return {name: float(values.mean()) for name, values in scores.items()}
    if isinstance(threshold, Mapping):
        unknown = sorted(set(threshold) - set(scores))
        if unknown:
            raise InvalidSettingError(
                f"plan: no scores for {', '.join(unknown)}. Scored layers: {', '.join(scores)}."
            )
        limits = dict(threshold)
    else:
        limits = dict.fromkeys(scores, threshold)
    for name, limit in limits.items():
        if not isinstance(limit, Real) or not math.isfinite(limit):
            raise InvalidSettingError(f"plan: the threshold of {name} is {limit!r}. Accepted: a finite number.")
    return limits


def _provenance(scores: Scores) -> dict[str, Any]:
    return {
        "status": scores.status.value,
        "objective": scores.objective,
        "bound": scores.bound,
        "gap": scores.gap,
        "settings": dict(scores.settings),
        "weights": scores.fingerprint.weights,
    }
