"""Wording: quantities and changes as short text."""

from __future__ import annotations

from critical_neurons.reports.content import CHANCE, Gain, ValueKind

SHORT = 1e-4
"""Times below this, in seconds, are shown in microseconds."""

THOUSANDS = ("", "k", "M", "G", "T")


def show_quantity(value: float, kind: ValueKind) -> str:
    """About three digits, in a suitable unit."""
    match kind:
        case "share":
            return f"{value:.2%}"
        case "count":
            return _scale(value, THOUSANDS)
        case "bytes":
            return _scale(value, tuple(f"{prefix}B" for prefix in THOUSANDS))
        case "seconds":
            if value < SHORT:
                return f"{_round(1e6 * value)} \N{MICRO SIGN}s"
            return f"{_round(1000 * value)} ms" if value < 1 else f"{_round(value)} s"


def show_change(gain: Gain) -> str:
    """The change: points for a share, the speed-up for seconds, the share that remains for everything else; a factor
    if the quantity has grown."""
    if gain.before is None:
        return gain.note
    if gain.before == gain.after:
        return "unchanged"
    if gain.kind == "share":
        return f"{100 * (gain.after - gain.before):+.2f} points".replace("-", "\N{MINUS SIGN}")
    if gain.kind == "seconds" and abs(gain.after - gain.before) <= CHANCE * gain.before:
        return "about the same"
    if gain.after > gain.before > 0:
        return (
            f"{gain.after / gain.before:.2f}\N{MULTIPLICATION SIGN} as {'long' if gain.kind == 'seconds' else 'much'}"
        )
    if gain.kind == "seconds":
        return f"{gain.before / gain.after:.2f}\N{MULTIPLICATION SIGN} as fast" if gain.after else ""
    return f"{gain.after / gain.before:.1%} left" if gain.before else ""


def show_number(value: float | None) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.6g}"


def show_share(value: float | None, digits: int = 1) -> str:
    return "\N{EN DASH}" if value is None else f"{value:.{digits}%}"


def _scale(value: float, units: tuple[str, ...]) -> str:
    place = 0
    while value >= 999.5 and place < len(units) - 1:
        value, place = value / 1000, place + 1
    return f"{_round(value) if place else f'{value:.0f}'} {units[place]}".rstrip()


def _round(value: float) -> str:
    """Three significant digits."""
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
