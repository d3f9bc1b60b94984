"""Everything is computed on the CPU, whatever device torch makes tensors on by default."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def on_cpu(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The same function, under no other default device than the CPU."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if torch.get_default_device().type == "cpu":  # within torch.device(...) every call of torch takes longer
            return function(*args, **kwargs)
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return run
