"""Budget: the largest share of units, parameters, multiply-adds or run time to keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from critical_neurons.core.settings import Plain, check_choice, check_share, data, explained, setting
from critical_neurons.errors import InvalidSettingError

if TYPE_CHECKING:  # it needs numpy, which `--help` has no time for
    from critical_neurons.core.structure import Measure

Scope: TypeAlias = Literal["layer", "global"]

MEASURES: tuple[Measure, ...] = ("units", "params", "macs", "latency")


@explained
@dataclass(frozen=True, kw_only=True, repr=False)
class Budget(Plain):
    """The share kept at most: one of `units`, `params`, `macs` and `latency`, above 0 and up to 1.

    >>> cn.Budget(macs=0.5)
    Budget(macs=0.5)
    >>> cn.Budget(units=0.5, scope="global").share
    0.5
    """

    units: float | None = setting(None, "Keep at most this share of the units, such as 0.5.")
    params: float | None = setting(None, "Keep at most this share of the parameters.")
    macs: float | None = setting(None, "Keep at most this share of the multiply-adds.")
    latency: float | None = data(
        "Take at most this share of the time. For `compress`, which measures how long layers take.", compare=True
    )
    scope: Scope = setting("layer", "Whether units are counted in each layer or over all.")

    def __post_init__(self) -> None:
        given = [name for name in MEASURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise InvalidSettingError(
                f"budget: found {', '.join(given) or 'none'}. Accepted: one of units, params, macs and latency."
            )
        share = getattr(self, given[0])
        object.__setattr__(self, given[0], check_share(given[0], share))
        check_choice("scope", self.scope, Scope)
        if self.scope == "global" and self.units is None:
            raise InvalidSettingError(f"scope: says how units are counted; {given[0]} always count over all layers.")

    @property
    def measure(self) -> Measure:
        return next(name for name in MEASURES if getattr(self, name) is not None)

    @property
    def share(self) -> float:
        share: float = getattr(self, self.measure)
        return share

    @property
    def by_layer(self) -> bool:
        return self.units is not None and self.scope == "layer"

    def with_share(self, share: float) -> Budget:
        """The same budget with another share."""
        return Budget(**{**self.to_dict(), self.measure: share})

    def to_dict(self) -> dict[str, Any]:
        return {self.measure: self.share, **({"scope": self.scope} if self.scope != "layer" else {})}

    def __repr__(self) -> str:
        return f"Budget({', '.join(f'{name}={value!r}' for name, value in self.to_dict().items())})"
