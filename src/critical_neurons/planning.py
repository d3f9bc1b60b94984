"""Planning: scores to plan, the public `plan`: by a rule, or by what the smaller model turns out to be worth."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, get_args

import numpy as np
from torch import nn

from critical_neurons.batch import digest_rows, gather_batch
from critical_neurons.costs import Measure
from critical_neurons.errors import InvalidSettingError
from critical_neurons.pipeline import Compensation, prune
from critical_neurons.plans import Plan
from critical_neurons.reading import unwrap
from critical_neurons.scores import Scores
from critical_neurons.selecting import Scope, Threshold, select_units

DROP_STEPS = 7
"""Bisections of the share kept: it is then known to within a hundredth."""

ROUNDING = 1e-9
"""By which a drop may exceed what is allowed: accuracies are quotients."""


def plan(
    scores: Scores,
    *,
    threshold: Threshold | None = None,
    units: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    max_drop: float | None = None,
    scope: Scope = "layer",
    min_units: int = 1,
    round_to: int = 1,
    keep: str | Collection[str] = (),
    model: nn.Module | None = None,
    example: Any = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    compensate: Compensation = "none",
    calibration: Any = None,
    judged_on: Any = None,
    measure: Measure = "macs",
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Keep the units that score high.

    `threshold`: remove what scores strictly below it; one number, one per layer, or "mean", each layer's own mean.
    `params`, `macs`: keep the highest-scored of all units whose parameters or multiply-adds are at most this share of
    the network's, counted as they will be; of scores with `start` or `stop`, of the span's. Without any of these,
    scores that were found under a budget keep to it.
    `units`: keep at most this share, the highest-scored, of every layer (`scope="layer"`) or of all units together
    (`scope="global"`). Every layer keeps `min_units`. Layers that share their units are chosen from as one. The
    number kept is a multiple of `round_to`, where that leaves any and the share allows it: rounded up under a
    threshold, down under a share. Among equal scores the unit with the smaller number stays. The layers in `keep`,
    and those that share units with them, lose nothing; a share of all units, parameters or multiply-adds is then met
    by the others. With `compensate`, here or in `search`, parameters are counted as if refitting gave every
    layer a bias.

    `max_drop`: remove as much of the `measure` as possible while `evaluate(smaller)` is at most this much below
    `evaluate(model)`, by bisection. The smaller models judged are made as `prune` makes them with `example`, a batch
    of inputs (noise of the right shape, unless given), `compensate` and `calibration`. `progress` is told of each of
    them; Ctrl-C leaves the best one so far. `judged_on` are the inputs that `evaluate` uses: the plan remembers them,
    and no comparison takes them for test data.
    """
    select = partial(
        select_units,
        scores,
        scope=scope,
        min_units=min_units,
        round_to=round_to,
        keep=keep,
        biases_added=compensate != "none",
    )
    if max_drop is None:
        return select(threshold=threshold, units=units, params=params, macs=macs)
    if any(value is not None for value in (threshold, units, params, macs)):
        raise InvalidSettingError("plan: max_drop= finds the share kept itself; leave out the others.")
    check_drop(max_drop)
    if measure not in get_args(Measure):
        raise InvalidSettingError(f"plan: measure={measure!r}. Accepted: {', '.join(map(repr, get_args(Measure)))}.")
    if model is None or evaluate is None:
        raise InvalidSettingError("plan: max_drop= needs model= and evaluate=, a function of a model.")
    inputs = None if calibration is None else gather_batch(calibration).inputs
    rows = _find_example(scores, example, inputs, compensate)

    def judge(chosen: Plan) -> float:
        smaller = prune(model, chosen, rows, compensate=compensate, calibration=inputs)
        return _evaluate(evaluate, smaller.eval(), chosen.rule)

    def choose(share: float) -> Plan:
        shares: dict[str, Any] = {measure: share}
        return select(**shares)

    reference = _evaluate(evaluate, copy.deepcopy(unwrap(model)).eval(), "nothing removed")
    found = _search(choose, judge, reference, float(max_drop), progress)
    if judged_on is None:
        return found
    drop = {**found.provenance["drop"], "judged_on": digest_rows(gather_batch(judged_on).inputs)}
    return replace(found, provenance={**found.provenance, "drop": drop})


def _find_example(scores: Scores, example: Any, calibration: Any, compensate: Compensation) -> Any:
    """Inputs to read the model with."""
    given = calibration if example is None else example
    if given is not None:
        return given
    if compensate != "none":
        raise InvalidSettingError(f"plan: compensate={compensate!r} needs calibration=, a batch of inputs.")
    if "input_shape" not in scores.settings:
        raise InvalidSettingError("plan: these scores do not say what an input looks like. Give example=, a batch.")
    return np.random.default_rng(0).standard_normal((2, *scores.settings["input_shape"]))


def check_drop(max_drop: float) -> None:
    if isinstance(max_drop, bool) or not isinstance(max_drop, Real) or not 0 <= max_drop < 1:
        raise InvalidSettingError(f"plan: max_drop={max_drop!r}. Accepted: a share of accuracy, such as 0.01.")


def _search(
    select: Callable[[float], Plan],
    judge: Callable[[Plan], float],
    reference: float,
    max_drop: float,
    progress: Callable[[str], None],
) -> Plan:
    """Bisection for the smallest share whose plan is worth enough."""
    best, worth, ending = _keep_all(select(1.0)), reference, ""
    known: dict[bytes, float] = {}
    low, high = 0.0, 1.0
    try:
        for _ in range(DROP_STEPS):
            middle = (low + high) / 2
            chosen = _try(select, middle)
            if chosen is None:
                low = middle
                continue
            key = chosen.stays.tobytes()
            if key not in known:
                known[key] = judge(chosen)
                progress(f"{chosen.rule}: {known[key]:.4g} after {reference:.4g}")
            if reference - known[key] <= max_drop + ROUNDING:
                high, best, worth = middle, chosen, known[key]
            else:
                low = middle
    except KeyboardInterrupt:
        ending = ", interrupted"
    found = f"at most {max_drop:.4g} lost ({reference - worth:.4g}, judged {len(known)} times{ending})"
    drop = {"max_drop": max_drop, "before": reference, "after": worth, "evaluations": len(known)}
    return replace(best, rule=f"{found}: {best.rule}", provenance={**best.provenance, "drop": drop})


def _keep_all(plan: Plan) -> Plan:
    """Rounding may take units from a plan that keeps a share of 1."""
    layers = tuple(replace(layer, kept=np.arange(layer.total), reason="kept") for layer in plan.layers)
    return replace(plan, layers=layers, rule="everything kept")


def _try(select: Callable[[float], Plan], share: float) -> Plan | None:
    """None where so small a share cannot be reached."""
    try:
        return select(share)
    except InvalidSettingError:
        return None


def _evaluate(evaluate: Callable[[nn.Module], float], model: nn.Module, what: str) -> float:
    try:
        value = float(evaluate(model))
    except Exception as error:
        raise InvalidSettingError(f"evaluate: raised {type(error).__name__}: {error} (network: {what}).") from error
    if not math.isfinite(value):
        raise InvalidSettingError(
            f"evaluate: returned {value} (network: {what}). Accepted: a finite number, as accuracy."
        )
    return value
