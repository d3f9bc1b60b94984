"""Warm start: a plan or scores as the first incumbent of the exact program, checked against its budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from critical_neurons.core.budget import Budget
from critical_neurons.core.network import Network
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.structure import NO_UNIT, Bools, Floats
from critical_neurons.errors import InvalidSettingError, PlanMismatchError
from critical_neurons.formulations import BudgetRows, budget_network
from critical_neurons.selection.plan_rules import select_units

Source: TypeAlias = Plan | Scores
"""What an incumbent can be made from."""

ROUNDING = 1e-9
"""Relative tolerance of limits: those of parameters and multiply-adds are computed by root finding."""

SHARE_STEP = 1e-4
"""Precision of the share that an error message suggests."""


@dataclass(frozen=True, eq=False)
class Proposal:
    """`mask` is 0 or 1 for every unit; `rule` and `weights` record how it was made and for which weights."""

    mask: Floats
    rule: str
    weights: str | None


def propose_mask(incumbent: Source, network: Network, budget: Budget | None) -> Proposal:
    """The mask of a plan, of scores that are all 0 or 1, or of the plan that other scores give under their budget."""
    made_for = incumbent.architecture if isinstance(incumbent, Plan) else incumbent.fingerprint.architecture
    if made_for != network.fingerprint.architecture:
        raise PlanMismatchError(
            "incumbent: made for another network: names or shapes of the parameters differ from this model's. Give a "
            "plan for this one."
        )
    if isinstance(incumbent, Scores) and np.isin(incumbent.per_unit, (0.0, 1.0)).all():
        proposal = Proposal(_spread(incumbent, network), "scores of 0 or 1", incumbent.fingerprint.weights)
    else:
        plan = incumbent if isinstance(incumbent, Plan) else _plan_scores(incumbent)
        proposal = Proposal(_mask(network, plan), plan.rule, plan.structure.fingerprint.weights)
    if budget is not None:
        _check_budget(proposal.mask, network, budget)
    return proposal


def _mask(network: Network, plan: Plan) -> Floats:
    """Matched by layer name and channel: the network may number its units differently, or leave layers out."""
    stays = np.ones(network.unit_count + 1)
    layers = {layer.name: layer for layer in network.layers}
    for planned in plan.layers:
        layer = layers.get(planned.name)
        if len(planned.removed) and (layer is None or (layer.units[planned.removed] == NO_UNIT).any()):
            reason = layer.reason if layer is not None else "there is no such layer"
            raise PlanMismatchError(
                f"incumbent: {planned.name}: the plan removes units of it, but they must stay: {reason}."
            )
        if layer is not None:
            stays[layer.units[planned.removed]] = 0.0
    return stays[:-1]


def _plan_scores(scores: Scores) -> Plan:
    if scores.budget is None:
        raise InvalidSettingError(
            "incumbent: these scores lie between 0 and 1 and have no budget, so they do not say which units "
            "stay. Give a plan made from them, such as cn.plan(scores, units=0.5)."
        )
    return select_units(scores)


def _spread(scores: Scores, network: Network) -> Floats:
    """Scores by layer as a mask over the network's units, which may be numbered differently."""
    mask = np.ones(network.unit_count + 1)
    for layer in network.layers:
        if layer.name in scores and layer.removable:
            mask[layer.units] = scores[layer.name]
    scored = {layer.name for layer in network.removable}
    lost = [name for name, values in scores.items() if name not in scored and not values.all()]
    if lost:
        raise PlanMismatchError(f"incumbent: {', '.join(lost)}: units of it are removed, but get no scores here.")
    return mask[:-1]


def _check_budget(mask: Floats, network: Network, budget: Budget) -> None:
    allowed = budget_network(network, budget)
    kept, over = allowed.weights @ mask, _find_excess(allowed, mask)
    if not over.any():
        return
    measure, share, counted = budget.measure, budget.share, ""
    if measure == "units" and len(kept) == len(network.group_sizes):
        found = "; ".join(
            f"{_name_group(network, group)} keeps {kept[group]:.0f} units, {allowed.limits[group]:.0f} are allowed"
            for group in np.flatnonzero(over).tolist()
        )
    elif measure == "units":
        found = f"{kept[0]:.0f} units are kept, {allowed.limits[0]:.0f} are allowed"
    else:
        found = f"{measure} are {kept[0] / allowed.limits[0] - 1:.2%} over what is allowed"
        counted = ", counted linearly around layers that all keep the same part (docs/method.md, section 5)"
    least = _find_share(mask, network, budget)
    raise InvalidSettingError(
        f"incumbent: over the budget, {measure}={share:.4g}{counted}: {found}. It is within {measure}={least:.4g}: "
        f"raise the budget to that, or give a plan within {share:.4g}."
    )


def _find_excess(budget: BudgetRows, mask: Floats) -> Bools:
    """The limits that the mask exceeds."""
    return np.asarray(budget.weights @ mask > budget.limits + ROUNDING * np.maximum(1.0, budget.limits))


def _name_group(network: Network, group: int) -> str:
    return ", ".join(network.structure.groups[group].layers)


def _find_share(mask: Floats, network: Network, budget: Budget) -> float:
    """The smallest share, in steps, whose budget the mask meets."""
    low, high = int(budget.share / SHARE_STEP), round(1 / SHARE_STEP)
    while high - low > 1:
        middle = (low + high) // 2
        wider = budget.with_share(middle * SHARE_STEP)
        over = _find_excess(budget_network(network, wider), mask).any()
        low, high = (middle, high) if over else (low, middle)
    return high * SHARE_STEP
