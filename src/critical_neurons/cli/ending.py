"""Ending: how a command ends that is cut short by a signal, or because its output cannot be written.

Nothing is imported here that takes time: an interrupt may come while the commands are.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from critical_neurons.interrupted_start import INTERRUPTED, TERMINATED

if TYPE_CHECKING:
    from rich.console import Console

BAD_INPUT, UNWRITABLE, CLOSED_PIPE = 2, 74, 141

IMPORTING = "<frozen importlib._bootstrap>"

commands: list[str] = []
"""Names of the commands that run."""

in_place: list[Console] = []
"""Consoles whose last line shows progress in place."""

WITHOUT_PROGRESS = b"\r\x1b[2K\x1b[?25h"
"""Clears the line of progress and shows the cursor again."""


class Terminated(BaseException):
    """SIGTERM: work is undone on the way out, and no result so far is used."""


class UnwritableError(Exception):
    """Standard output cannot be written. Not an `OSError`, which would be taken for that of a file."""


def run_to_an_end(run: Callable[[], None]) -> NoReturn:
    """Exit with the code of `run`, or with one that says what cut it short."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _end)
    _occupy_closed()
    sys.stdout, sys.stderr = _StandardStream(1, strict=True).open(), _StandardStream(2, strict=False).open()
    try:
        try:
            _check_folder()
            run()
        finally:
            sys.stdout.flush()
    except Terminated:
        _leave(TERMINATED, "Terminated.")
    except KeyboardInterrupt:
        _leave(INTERRUPTED, "Interrupted.")
    except UnwritableError as error:
        closed = str(error) == os.strerror(errno.EPIPE)  # as by `head`
        _leave(CLOSED_PIPE if closed else UNWRITABLE, "" if closed else f"Error: standard output: {error}.")
    sys.exit(0)


def _occupy_closed() -> None:
    """Occupy the numbers of closed streams, which files opened later would get otherwise."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError:
        _leave(BAD_INPUT, "Error: the working directory is no longer there. Change to another.")


def _end(number: int, frame: FrameType | None) -> None:
    """Raise if a command can undo its work; otherwise exit, since imports turn exceptions into others."""
    interrupted = number == signal.SIGINT
    if not commands or _imports(frame):
        _leave(*((INTERRUPTED, "Interrupted.") if interrupted else (TERMINATED, "Terminated.")))
    raise KeyboardInterrupt if interrupted else Terminated


def _imports(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


def _leave(code: int, text: str) -> NoReturn:
    cleared = WITHOUT_PROGRESS if in_place else b""
    if cleared or text:
        with suppress(OSError):
            os.write(2, cleared + (f"{text}\n".encode() if text else b""))
    os._exit(code)


class _StandardStream(io.RawIOBase):
    """Standard output, or standard error, whose failures are ignored."""

    def __init__(self, number: int, *, strict: bool) -> None:
        self._number, self._strict = number, strict

    def open(self) -> io.TextIOWrapper:
        """Characters that the encoding lacks, such as λ, become question marks."""
        given = sys.stdout if self._strict else sys.stderr
        encoding = "utf-8" if given is None else given.encoding
        buffer = io.BufferedWriter(self)  # type: ignore[type-var]
        return io.TextIOWrapper(buffer, encoding=encoding, errors="replace", line_buffering=True)

    def fileno(self) -> int:
        return self._number

    def isatty(self) -> bool:
        try:
            return os.isatty(self._number)
        except OSError:
            return False

    def writable(self) -> bool:
        return True

    def write(self, data: bytes) -> int:  # type: ignore[override]
        try:
            return os.write(self._number, data)
        except OSError as error:
            if self._strict:
                raise UnwritableError(error.strerror) from None
            return len(data)
