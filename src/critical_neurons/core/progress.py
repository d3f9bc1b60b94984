"""Progress: how far a stage of some work has come, and the time that is left, as a line of text with its numbers."""

from __future__ import annotations

import time
from collections.abc import Callable


class Progress(str):
    """A line of text about running work. Where a stage can be counted, it also has how much is `done` of the `total`,
    and the seconds left of this stage at the pace so far (`seconds_left`); None if not known.

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
        """Without a `total` only the stage is known. `note`: further text."""
        counts = f"{done} of {total}" if total else ""
        left = "" if seconds_left is None else f"{show_time(seconds_left)} left"
        details = ", ".join(filter(None, (counts, left, note)))
        found = super().__new__(cls, f"{stage}: {details}" if details else stage)
        found.stage, found.done, found.total = stage, done, total
        found.seconds_left, found.note = seconds_left, note
        return found

    def __getnewargs__(self) -> tuple[str, int, int, float | None, str]:  # type: ignore[override]
        return self.stage, self.done, self.total, self.seconds_left, self.note


class Stage:
    """Reports the progress of one stage of some work. Call it with how much is done, and the total."""

    def __init__(self, report: Callable[[Progress], None], name: str, *, deadline: float | None = None) -> None:
        """`deadline`: when the stage will be stopped, as a time of `time.monotonic`."""
        self._report, self._name, self._deadline = report, name, deadline
        self._began, self._first = time.monotonic(), 0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done <= self._first:  # what came before is no part of the pace
            self._began, self._first = now, done
        paced = done - self._first
        known = [(now - self._began) / paced * (total - done)] if paced else []
        if self._deadline is not None:
            known.append(max(self._deadline - now, 0.0))
        self._report(Progress(self._name, done, total, min(known, default=None)))


def show_time(seconds: float) -> str:
    """In two units at most."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
