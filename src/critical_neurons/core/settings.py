"""Settings: everything a scoring run can be told, checked before any work begins."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, get_args

from critical_neurons.core.costs import Measure
from critical_neurons.core.span import Span
from critical_neurons.errors import InvalidSettingError

Compensation: TypeAlias = Literal["none", "bias", "least_squares"]

ObjectiveName: TypeAlias = Literal["balanced", "authors", "paper"]
FormulationName: TypeAlias = Literal["paper", "exact", "linearised"]
BoundsName: TypeAlias = Literal["interval", "backward"]
BUDGETS: tuple[Measure, ...] = ("units", "params", "macs")
EXACT_STOP = (
    "stop: formulation='exact' bounds the loss of the masked network, which an expansion of what follows the span "
    "does not. Leave stop out, or take 'paper' or 'linearised'."
)


@dataclass(frozen=True)
class Settings:
    """As described in `cn.score`."""

    loss_weight: float | Literal["auto", "lagrangian"] = 5.0
    input_radius: float = 0.0
    objective: ObjectiveName = "balanced"
    rescale: float = 2.0
    formulation: FormulationName = "paper"
    integer: bool = True
    binary: bool = False
    bounds: BoundsName | Literal["user"] = "interval"
    budget: Mapping[str, Any] | None = None
    units: float | None = None
    loss_increase: float | None = None
    by_class: bool = False
    solver: str = "auto"
    solver_options: Mapping[str, Any] = field(default_factory=dict)
    time_limit: float = 300.0
    gap: float = 1e-4
    threads: int | None = None
    seed: int = 0
    ignore: tuple[str, ...] = ()
    start: str | None = None
    stop: str | None = None

    def __post_init__(self) -> None:
        for name in ("input_radius", "gap"):
            self._require(name, Real, lambda value: math.isfinite(value) and value >= 0, "0 or more")
        if self.loss_weight not in ("auto", "lagrangian"):
            self._require(
                "loss_weight",
                Real,
                lambda value: math.isfinite(value) and value >= 0,
                "0 or more, 'auto' or 'lagrangian'",
            )
        self._require("rescale", Real, math.isfinite, "a finite number")
        self._require("time_limit", Real, lambda value: value > 0, "a number of seconds above 0")
        self._require("seed", Integral, lambda value: 0 <= value < 2**31, "a whole number from 0 to 2**31 - 1")
        if self.threads is not None:
            self._require("threads", Integral, lambda value: value >= 1, "a whole number of at least 1, or None")
        if not isinstance(self.solver, str):
            raise InvalidSettingError(f"solver: found {self.solver!r}. Accepted: a name such as 'highs'.")
        for name, choices in (("objective", ObjectiveName), ("formulation", FormulationName)):
            if getattr(self, name) not in get_args(choices):
                accepted = ", ".join(map(repr, get_args(choices)))
                raise InvalidSettingError(f"{name}: found {getattr(self, name)!r}. Accepted: {accepted}.")
        Span(self.start, self.stop)
        if self.bounds not in (*get_args(BoundsName), "user"):
            accepted = ", ".join(map(repr, get_args(BoundsName)))
            raise InvalidSettingError(f"bounds: found {self.bounds!r}. Accepted: {accepted}, or Bounds of your own.")
        self._check_together()

    def _check_together(self) -> None:
        if self.formulation != "paper" and self.input_radius:
            raise InvalidSettingError(
                f"input_radius: found {self.input_radius}; formulation={self.formulation!r} takes inputs as points."
            )
        if self.bounds != "interval" and self.formulation == "linearised":
            raise InvalidSettingError("bounds: formulation='linearised' takes the gates as they are at the inputs.")
        if self.binary and self.formulation != "exact":
            raise InvalidSettingError("binary: scores of 0 or 1 go with formulation='exact'.")
        if self.stop is not None and self.formulation == "exact":
            raise InvalidSettingError(EXACT_STOP)
        if (self.loss_weight == "auto") != (self.units is not None):
            raise InvalidSettingError("units: the share wanted goes with loss_weight='auto', and that needs it.")
        if (self.loss_weight == "lagrangian") != (self.loss_increase is not None):
            raise InvalidSettingError(
                "loss_increase: by how much the mean loss may rise goes with loss_weight='lagrangian', and that "
                "needs it, as loss_increase=0.01."
            )
        if self.loss_increase is not None:
            self._require(
                "loss_increase", Real, lambda value: math.isfinite(value) and value >= 0, "a number of 0 or more"
            )
        if self.units is not None:
            self._require("units", Real, lambda value: 0 < value < 1, "a share between 0 and 1")
        if self.budget is not None:
            self._check_budget(self.budget)

    def _check_budget(self, budget: Mapping[str, Any]) -> None:
        if not isinstance(budget, Mapping):
            raise InvalidSettingError(f"budget: found {budget!r}. Accepted: a mapping such as {{'units': 0.5}}.")
        if self.loss_weight in ("auto", "lagrangian"):
            raise InvalidSettingError(
                f"budget: it takes the place of the sparsity term; leave out loss_weight={self.loss_weight!r}."
            )
        measures = [name for name in BUDGETS if name in budget]
        unknown = set(budget) - {*BUDGETS, "scope"}
        if len(measures) != 1 or unknown or budget.get("scope", "layer") not in ("layer", "global"):
            raise InvalidSettingError(
                f"budget: found {dict(budget)}. Accepted: one of units, params, macs with the share kept, such as "
                "{'units': 0.5}; units by layer unless {'units': 0.5, 'scope': 'global'}."
            )
        share: float = budget[measures[0]]
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < share <= 1:
            raise InvalidSettingError(f"budget: {measures[0]}={share!r}. Accepted: a share above 0 and up to 1.")
        object.__setattr__(self, "budget", {**budget, measures[0]: float(share)})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ignore": list(self.ignore)}

    def _require(self, name: str, kind: Any, holds: Callable[[Any], bool], accepted: str) -> None:
        """Check a number, and keep it as Python's own."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
            raise InvalidSettingError(f"{name}: found {value!r}. Accepted: {accepted}.")
        object.__setattr__(self, name, int(value) if kind is Integral else float(value))


def as_names(ignore: str | Collection[str]) -> tuple[str, ...]:
    """One name of a layer, or several."""
    if isinstance(ignore, str):
        return (ignore,)
    if not isinstance(ignore, Collection) or not all(isinstance(name, str) for name in ignore):
        raise InvalidSettingError(f"ignore: found {ignore!r}. Accepted: names of layers.")
    return tuple(ignore)


def check_compensation(compensate: str) -> None:
    if compensate not in get_args(Compensation):
        accepted = ", ".join(map(repr, get_args(Compensation)))
        raise InvalidSettingError(f"compensate: found {compensate!r}. Accepted: {accepted}.")
