"""The public `plan`: scores to plan, by a rule, or by the quality of the smaller model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, TypeAlias, get_args

import numpy as np
from torch import nn

from critical_neurons.api.prune import prune
from critical_neurons.core.budget import Scope
from critical_neurons.core.distillation import Distillation
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.core.settings import Compensation
from critical_neurons.core.structure import Counted
from critical_neurons.errors import InvalidSettingError
from critical_neurons.readers import isolated
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.rows import digest_inputs, gather_inputs
from critical_neurons.selection.group_counts import Threshold
from critical_neurons.selection.plan_rules import select_units
from critical_neurons.structure import unwrap

Chooser: TypeAlias = Callable[[float], tuple[Plan, Scores]]
"""A plan that keeps a given share, and its scores; raises an InvalidSettingError if the share cannot be reached."""

DROP_STEPS = 7
"""Bisections of the share kept: it is then known to within a hundredth."""

ROUGH_STEPS, FINE_STEPS, FINE_REACH = 5, 3, 0.75
"""If good plans take long to find: bisections with rough plans, then with good ones, between the share found and this
fraction of it."""

ROUNDING = 1e-9
"""Tolerance of drops, for rounding in accuracies."""


@isolated
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
    compensate: Compensation | Distillation = "none",
    calibration: Any = None,
    judged_on: Any = None,
    measure: Counted = "macs",
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Keep the units with the highest scores.

    * `threshold`: remove units that score strictly below it; one number, one per layer, or "mean", each layer's mean.
    * `units`: keep at most this share of every layer (`scope="layer"`) or of all units together (`scope="global"`).
    * `params`, `macs`: keep as many of the highest-scored units of all layers as have at most this share of the
      network's parameters or multiply-adds; for scores with `start` or `stop`, of the span's.
    * Without any of these, scores that were found under a budget keep to it.

    Every layer keeps `min_units`. Layers that share their units are treated as one. The number of units kept is a
    multiple of `round_to`, if the budget allows: rounded up with a threshold, down with a share. Of equal scores the
    unit with the smaller number stays. The layers in `keep`, and those that share units with them, lose nothing; a
    share of all units, parameters or multiply-adds is then met by the others. With `compensate`, here or in `search`,
    parameters are counted as if refitting gave every layer a bias.

    `max_drop`: remove as much of the `measure` as possible while `evaluate(smaller)` is at most this much below
    `evaluate(model)`, by bisection. The candidates are made as `prune` makes them with `example`, a batch of inputs
    (the calibration inputs by default), `compensate` and `calibration`. `progress` receives a message for each of
    them; Ctrl-C leaves the best one so far. `judged_on` are the inputs that `evaluate` uses: the plan remembers them,
    and comparisons do not call them test data.

    >>> scores = cn.score(model, inputs[:3], labels[:3])
    >>> plan = cn.plan(scores, units=0.5, keep=["0"])
    >>> list(plan.removed)
    ['3']
    """
    if not isinstance(scores, Scores):
        raise InvalidSettingError(
            f"plan: found {type(scores).__name__}. Accepted: Scores, as score, search and Scores.load return."
        )
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
    if measure not in get_args(Counted):
        raise InvalidSettingError(f"plan: measure={measure!r}. Accepted: {', '.join(map(repr, get_args(Counted)))}.")
    if model is None or evaluate is None:
        raise InvalidSettingError("plan: max_drop= needs model= and evaluate=, a function of a model.")
    inputs = None if calibration is None else gather_inputs(calibration)
    given = inputs if example is None else example
    if given is None and compensate != "none":
        raise InvalidSettingError(f"plan: compensate={compensate!r} needs calibration=, a batch of inputs.")

    def choose(share: float) -> tuple[Plan, Scores]:
        shares: dict[str, Any] = {measure: share}
        return select(**shares), scores

    found, _ = find_most(
        choose,
        model=model,
        max_drop=max_drop,
        evaluate=evaluate,
        make=lambda chosen: prune(model, chosen, given, compensate=compensate, calibration=inputs),
        judged_on=judged_on,
        progress=progress,
    )
    return found


def find_most(
    choose: Chooser,
    *,
    finer: Chooser | None = None,
    model: nn.Module,
    max_drop: float,
    evaluate: Callable[[nn.Module], float],
    make: Callable[[Plan], nn.Module],
    judged_on: Any = None,
    progress: Callable[[str], None] = lambda text: None,
) -> tuple[Plan, Scores]:
    """The plan of `plan(max_drop=...)`, and its scores, which may differ from share to share.

    `finer` chooses better but takes longer, so it is used only for the last candidates. `make` carries out a plan.
    """

    def judge(chosen: Plan) -> float:
        return _evaluate(evaluate, make(chosen).eval(), chosen.rule)

    reference = _evaluate(evaluate, copy_whole(unwrap(model)).eval(), "nothing removed")
    found = _Bisection(choose(1.0), judge, reference, float(max_drop), progress)
    ending = ""
    try:
        found.narrow(choose, 0.0, DROP_STEPS if finer is None else ROUGH_STEPS)
        if finer is not None and (found.share == 1.0 or found.accept(finer, found.share)):
            found.narrow(finer, FINE_REACH * found.share, FINE_STEPS)
    except KeyboardInterrupt:
        ending = ", interrupted"
    lost = f"{reference - found.worth:.4g}, judged {len(found.known)} times{ending}"
    drop = {
        "max_drop": float(max_drop),
        "before": reference,
        "after": found.worth,
        "evaluations": len(found.known),
        "trials": found.trials,
    }
    judges = () if judged_on is None else digest_inputs(gather_inputs(judged_on))
    return replace(
        found.plan,
        rule=f"at most {max_drop:.4g} lost ({lost}): {found.plan.rule}",
        provenance={**found.plan.provenance, "drop": drop},
        seen=found.plan.seen.union(judges),
    ), found.scores


class _Bisection:
    """The smallest acceptable plan so far, its scores, and all trials."""

    def __init__(
        self,
        everything: tuple[Plan, Scores],
        judge: Callable[[Plan], float],
        reference: float,
        max_drop: float,
        progress: Callable[[str], None],
    ) -> None:
        self.plan, self.scores, self.worth, self.share = _keep_all(everything[0]), everything[1], reference, 1.0
        self.known: dict[bytes, float] = {}
        self.trials: list[dict[str, float]] = []
        self._judge, self._reference, self._max_drop, self._report = judge, reference, max_drop, progress

    def narrow(self, choose: Chooser, low: float, steps: int) -> None:
        """Bisection between a share that is too small and the smallest accepted one."""
        for _ in range(steps):
            middle = (low + self.share) / 2
            if not self.accept(choose, middle):
                low = middle

    def accept(self, choose: Chooser, share: float) -> bool:
        """Accept the plan for the share if it loses no more than allowed. Returns whether it does."""
        try:
            chosen, scores = choose(share)
        except InvalidSettingError:  # the share cannot be reached
            return False
        key = chosen.stays.tobytes()
        if key not in self.known:
            self.known[key] = self._judge(chosen)
            self.trials.append({"share": share, "worth": self.known[key]})
            self._report(f"{chosen.rule}: {self.known[key]:.4g} after {self._reference:.4g}")
        if self._reference - self.known[key] > self._max_drop + ROUNDING:
            return False
        self.plan, self.scores, self.worth, self.share = chosen, scores, self.known[key], share
        return True


def check_drop(max_drop: float) -> None:
    if isinstance(max_drop, bool) or not isinstance(max_drop, Real) or not 0 <= max_drop < 1:
        raise InvalidSettingError(f"plan: max_drop={max_drop!r}. Accepted: a share of accuracy, such as 0.01.")


def _keep_all(plan: Plan) -> Plan:
    """Everything: a plan for a share of 1 may lose units to rounding."""
    return replace(plan, stays=np.ones_like(plan.stays), reasons={}, rule="everything kept")


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
