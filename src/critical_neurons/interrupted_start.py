"""Interrupted start: the command line tool ends cleanly from the first line of the package on.

Python's own handler raises an exception wherever it is, and imports turn that into tracebacks of all kinds. The
package is imported before its commands are, so this comes first in it; in a library's use nothing is changed.
"""

import _signal  # type: ignore[import-not-found]  # `signal` itself takes milliseconds, in which an interrupt may come
import os
import sys

INTERRUPTED, TERMINATED = 130, 143
COMMAND = "critical-neurons"
PACKAGE = "critical_neurons"


def is_command() -> bool:
    """Whether this process is the command line tool, by its name or by `python -m`."""
    if sys.argv[:1] == ["-m"]:  # while Python looks for the module
        return PACKAGE in sys.orig_argv[1:]
    return bool(sys.argv) and os.path.basename(sys.argv[0]).removesuffix(".exe") == COMMAND


def end_cleanly() -> None:
    for number, code, text in (
        (_signal.SIGINT, INTERRUPTED, b"Interrupted.\n"),
        (_signal.SIGTERM, TERMINATED, b"Terminated.\n"),
    ):
        _signal.signal(number, lambda *_, code=code, text=text: _leave(code, text))


def _leave(code: int, text: bytes) -> None:
    try:
        os.write(2, text)
    finally:
        os._exit(code)


if is_command():
    end_cleanly()
