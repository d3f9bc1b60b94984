"""Settings: everything a scoring run can be told, checked before any work begins."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
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
        for name in ("loss_weight", "input_radius", "gap", "seed"):
            _require(name, getattr(self, name), lambda value: math.isfinite(value) and value >= 0, "0 or more")
        _require("rescale", self.rescale, math.isfinite, "a finite number")
        _require("time_limit", self.time_limit, lambda value: value > 0, "a number of seconds above 0")
        if self.threads is not None:
            _require("threads", self.threads, lambda value: value >= 1, "1 or more, or None")
        if self.objective not in get_args(ObjectiveName):
            raise InvalidSettingError(f"objective: found {self.objective!r}. Accepted: 'published', 'paper'.")

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ignore": list(self.ignore)}


def _require(name: str, value: Any, holds: Any, accepted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not holds(value):
        raise InvalidSettingError(f"{name}: found {value!r}. Accepted: {accepted}.")
