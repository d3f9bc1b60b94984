"""User code: lines and names of the user's own code in a running or failed forward pass."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from types import CodeType, FrameType

import torch

from critical_neurons.removal import attention

OWN = os.path.dirname(os.path.dirname(__file__))
TORCH = os.path.dirname(torch.__file__)


def list_names(entry: CodeType | None) -> set[str]:
    """Names in the code of the running module's forward and of functions it calls; `entry` started the run."""
    names: set[str] = set()
    for frame in _list_frames(entry):
        code = frame.f_code
        if code.co_name == "_call_impl":
            break
        if not code.co_filename.startswith(OWN) or code.co_filename == attention.__file__:
            names.update(code.co_names)
    return names


def find_running_line(entry: CodeType | None) -> str:
    """The innermost line of the user's code, such as "model.py:12", if there is one."""
    for frame in _list_frames(entry):
        path = frame.f_code.co_filename
        if not path.startswith((OWN, TORCH, "<")):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
    return ""


def find_failing_line(error: BaseException | None) -> str:
    """The line of the user's code at which a forward pass failed, in brackets."""
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    own = [frame for frame in frames if not frame.filename.startswith((OWN, TORCH))]
    return f" ({os.path.basename(own[-1].filename)}:{own[-1].lineno})" if own else ""


def _list_frames(entry: CodeType | None) -> Iterator[FrameType]:
    """From the inside out, up to the code that started the run."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not entry:
        yield frame
        frame = frame.f_back
