"""Progress: how far a stage of some work has come, and the time that is left, as a line of text with its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress(str):
    """A line of text about work that goes on. Where the stage can be counted, it also has how much
    is `done` of the `total`, and the seconds that are left of this stage, at the pace so far; None where not known.

    >>> print(cn.Progress("pricing layers", 3, 12, seconds_left=95))
    pricing layers: 3 of 12, 1 min 35 s left
    """

    stage: str
    done: int
    total: int
    seconds_left: float | None
    note: str

    def __new__(
        cls, stage: str, done: int = 0, total: int = 0, seconds_left: float | None = None, note: str = ""
    ) -> Progress:
        """Without a `total` the stage alone is known. `note`: what else is to be said."""
        counts = f"{done} of {total}" if total else ""
        left = "" if seconds_left is None else f"{show_time(seconds_left)} left"
        told = ", ".join(filter(None, (counts, left, note)))
        found = super().__new__(cls, f"{stage}: {told}" if told else stage)
        found.stage, found.done, found.total = stage, done, total
        found.seconds_left, found.note = seconds_left, note
        return found

    def __getnewargs__(self) -> tuple[str, int, int, float | None, str]:  # type: ignore[override]
        return self.stage, self.done, self.total, self.seconds_left, self.note


class Stage:
    """Tells of a stage of some work whenever it is called with how much is done, and of how much."""

    def __init__(self, tell: Callable[[Progress], None], name: str, *, deadline: float | None = None) -> None:
        """`deadline`: when it will be given up, by `time.monotonic`."""
        self._tell, self._name, self._deadline = tell, name, deadline
        self._began, self._first = time.monotonic(), 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done <= self._first:  # what came before is no part of the pace
            self._began, self._first = now, done
        paced = done - self._first
        known = [(now - self._began) / paced * (total - done)] if paced else []
        if self._deadline is not None:
            known.append(max(self._deadline - now, 0.0))
        self._tell(Progress(self._name, done, total, min(known, default=None)))


def show_time(seconds: float) -> str:
    """In two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
