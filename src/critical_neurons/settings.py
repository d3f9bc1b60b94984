"""Settings: everything a scoring run can be told, checked before any work begins."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, get_args

from critical_neurons.errors import InvalidSettingError

ObjectiveName: TypeAlias = Literal["published", "paper"]


@dataclass(frozen=True)
class Settings:
    """As described in `scoring.score`."""

    loss_weight: float = 5.0
    input_radius: float = 0.0
    objective: ObjectiveName = "published"
    rescale: float = 2.0
    integer: bool = True
    by_class: bool = False
    solver: str = "highs"
    time_limit: float = 300.0
    gap: float = 1e-4
    threads: int | None = None
    seed: int = 0
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("loss_weight", "input_radius", "gap"):
            self._require(name, Real, lambda value: math.isfinite(value) and value >= 0, "0 or more")
        self._require("rescale", Real, math.isfinite, "a finite number")
        self._require("time_limit", Real, lambda value: value > 0, "a number of seconds above 0")
        self._require("seed", Integral, lambda value: 0 <= value < 2**31, "a whole number from 0 to 2**31 - 1")
        if self.threads is not None:
            self._require("threads", Integral, lambda value: value >= 1, "a whole number of at least 1, or None")
        if self.objective not in get_args(ObjectiveName):
            raise InvalidSettingError(f"objective: found {self.objective!r}. Accepted: 'published', 'paper'.")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ignore": list(self.ignore)}

    def _require(self, name: str, kind: Any, holds: Callable[[Any], bool], accepted: str) -> None:
        """Check a number, and keep it as Python's own."""
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, kind) or not holds(value):
            raise InvalidSettingError(f"{name}: found {value!r}. Accepted: {accepted}.")
        object.__setattr__(self, name, int(value) if kind is Integral else float(value))
