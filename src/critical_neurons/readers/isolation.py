"""Isolation: public calls do not depend on the caller's global settings, and do not change them."""

from __future__ import annotations

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np
import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

SEED = 0
"""Seed of the process's generators, which a model may use; the package has its own seeds."""


def isolated(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run the function as in a fresh process: default device CPU, default type float32, no autocast, gradients
    enabled, warnings not turned into errors, fixed seeds. Afterwards everything is restored; other threads see the
    default type and the generators meanwhile.

    The number of threads stays the caller's, and with it the rounding of sums.
    """

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with _in_this_process, _in_this_thread():
            return function(*args, **kwargs)

    return run


@contextmanager
def _in_this_thread() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":  # torch.device(...) slows down every call of torch
            stack.enter_context(torch.device("cpu"))
        yield


class _Unused(Warning):
    """Of no warning."""


class _Process:
    """Settings of the whole process: set by the first isolated call, restored by the last one that ends."""

    def __init__(self) -> None:
        self._lock, self._calls, self._before = threading.Lock(), 0, ExitStack()

    def __enter__(self) -> None:
        with self._lock:
            if self._calls == 0:
                self._before = _set_process()
            self._calls += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls == 0:
                self._before.close()


def _set_process() -> ExitStack:
    """Apply the settings; closing the stack restores them."""
    stack = ExitStack()
    stack.enter_context(warnings.catch_warnings())
    if any(action == "error" for action, *_ in warnings.filters):
        warnings.filters[:] = [each for each in warnings.filters if each[0] != "error"]  # type: ignore[index]
        warnings.simplefilter("default", _Unused, append=True)  # says that the filters are others now
    stack.callback(_set_threads, torch.get_num_threads())
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())  # a model may set it, too
    torch.set_default_dtype(torch.float32)
    if torch.get_float32_matmul_precision() != "highest":
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.set_float32_matmul_precision("highest")
    stack.callback(torch.default_generator.set_state, torch.default_generator.get_state())
    stack.callback(np.random.set_state, np.random.get_state())  # noqa: NPY002  a model may draw from it
    stack.callback(random.setstate, random.getstate())
    torch.default_generator.manual_seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002
    random.seed(SEED)
    return stack


def _set_threads(count: int) -> None:
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)


_in_this_process = _Process()
