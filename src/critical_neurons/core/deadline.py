"""Deadline: stop work that runs past its time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_DEADLINE = ContextVar("deadline", default=math.inf)


class TimeIsUp(Exception):
    """Caught where the deadline was set; the user never sees it."""


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """`check_time` raises once `time.monotonic()` is past the deadline."""
    before = _DEADLINE.set(deadline)
    try:
        check_time()
        yield
    finally:
        _DEADLINE.reset(before)


def check_time() -> None:
    """Called between steps that take long in large networks."""
    if time.monotonic() > _DEADLINE.get():
        raise TimeIsUp
