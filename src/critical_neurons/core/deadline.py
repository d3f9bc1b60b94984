"""Deadline: stop work that runs past its time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from critical_neurons.errors import SolverError

_DEADLINE = ContextVar("deadline", default=math.inf)


GRACE, GRACE_SHARE = 0.7, 0.07
"""Seconds, or share of the limit if that is more, by which a model may be read too late."""


class TimeIsUp(BaseException):
    """Caught where the deadline was set; the user never sees it. It is not an `Exception`, so that handlers in
    between do not take it for a failure of the model."""


@contextmanager
def until(deadline: float) -> Iterator[None]:
    """`check_time` raises once `time.monotonic()` is past the deadline."""
    before = _DEADLINE.set(deadline)
    try:
        check_time()
        yield
    finally:
        _DEADLINE.reset(before)


@contextmanager
def reading_until(started: float, seconds: float) -> Iterator[None]:
    """For the part of a call without which there is no result: an error if it takes the whole time limit and more."""
    try:
        with until(started + seconds + max(GRACE, GRACE_SHARE * seconds)):
            yield
    except TimeIsUp:
        raise SolverError(f"time_limit: {seconds:g} s were over before the model was read. Allow more.") from None


def check_time() -> None:
    """Called between steps that take long in large networks."""
    if time.monotonic() > _DEADLINE.get():
        raise TimeIsUp
