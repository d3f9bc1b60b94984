"""Curve: quality of networks of several sizes, by one or more methods of choosing units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

from critical_neurons.core.comparison import Comparison
from critical_neurons.core.documents import Amount, Document, Share
from critical_neurons.core.hooks import Shown, call_hook
from critical_neurons.core.structure import Measure

Method: TypeAlias = Literal["search", "paper", "norm", "random"]
"""How units are chosen: by `search`, by the paper's scores, by the norms of their weights, or at random."""


@dataclass(frozen=True)
class CurvePoint:
    """A network that keeps at most `share`, the method that chose its units, and its comparison with the original.
    `seconds` is the time for choosing and refitting."""

    method: Method
    share: Share
    comparison: Comparison
    seconds: Amount

    @property
    def name(self) -> str:
        return name_point(self.method, self.share)

    @property
    def worth(self) -> tuple[str, float | None]:
        """Name and value of its quality: the accuracy or, without labels, the share of same predictions."""
        if self.comparison.after.accuracy is not None:
            return "accuracy", self.comparison.after.accuracy
        return "same predictions", self.comparison.agreement

    @property
    def seconds_per_input(self) -> tuple[float, float] | None:
        """Before and after, in torch."""
        found = [each.latency("torch", 1) for each in (self.comparison.before, self.comparison.after)]
        return None if found[0] is None or found[1] is None else (found[0].median, found[1].median)


def name_point(method: Method, share: float) -> str:
    return f"{method}-{share}"


@dataclass(frozen=True)
class Curve(Shown, Document):
    """Points by method, each from the largest network to the smallest, and the `settings` of the sweep.

    >>> found = cn.sweep(model, inputs, labels, macs=[0.6, 0.3], effort="quick")
    >>> found.curve.save("curve.json")
    >>> len(cn.Curve.load("curve.json").points)
    2
    """

    FORMAT: ClassVar = "critical_neurons curve"
    FORMAT_VERSION: ClassVar = 1

    measure: Measure
    points: tuple[CurvePoint, ...]
    settings: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> list[tuple[str, str, str, str, str, str]]:
        """Method, requested share, quality, multiply-adds, parameters, time in torch; the last three as shares."""
        rows: list[tuple[str, str, str, str, str, str]] = []
        for point in self.points:
            before, after = point.comparison.before, point.comparison.after
            timed, worth = point.seconds_per_input, point.worth[1]
            rows.append(
                (
                    point.method,
                    f"{point.share:g}",
                    "none" if worth is None else f"{worth:.2%}",
                    f"{after.macs / before.macs:.1%}" if before.macs else "none",
                    f"{after.parameters / before.parameters:.1%}" if before.parameters else "none",
                    "none" if timed is None else f"{timed[1] / timed[0]:.1%}",
                )
            )
        return rows

    @property
    def headers(self) -> tuple[str, str, str, str, str, str]:
        worth = self.points[0].worth[0] if self.points else "accuracy"
        return "method", f"{self.measure} kept at most", worth, "multiply-adds", "parameters", "time"

    def __str__(self) -> str:
        table = [self.headers, *self.rows]
        widths = [max(len(row[at]) for row in table) for at in range(len(self.headers))]
        lines = ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join([*lines, *self.notes])

    def plot(self, axes: Any = None, *, by: Literal["macs", "params", "time"] = "macs") -> Any:
        """Draw the quality of every point by its multiply-adds, parameters or measured time. Returns matplotlib axes;
        needs the extra `plot`."""
        return call_hook("plot", self, axes, by=by)
