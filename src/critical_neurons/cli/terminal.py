"""What the user sees: tables and JSON on standard output, notes, progress and errors on standard error."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

import typer

from critical_neurons.errors import CriticalNeuronsError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

BAD_INPUT = 2
INTERRUPTED = 130
SECONDS_BETWEEN_LINES = 5.0
"""How often progress is told to a log file; a terminal sees every step."""

WIDTH_OF_FILES = 140
"""Columns where the output is no terminal."""

Parameters = ParamSpec("Parameters")


def reports_errors(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """The user's mistakes end in one sentence and exit code 2, an interrupt in 130; bugs keep their traceback."""

    @functools.wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except CriticalNeuronsError as error:
            if kwargs.get("as_json"):
                show_json({"error": {"type": type(error).__name__, "message": str(error)}})
            note(f"Error: {error}")
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            note("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None

    return run


def show(renderable: RenderableType) -> None:
    _console().print(renderable)


def show_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=2))


def note(text: str) -> None:
    typer.echo(text, err=True)


@contextmanager
def show_progress() -> Iterator[Callable[[object], None]]:
    """A line that follows the work, such as the steps of a solver; in a log file a new line every few seconds."""
    console = _console(stderr=True)
    if console.is_terminal:
        with console.status("") as status:
            yield lambda state: status.update(str(state))
        return
    told = time.monotonic()

    def tell(state: object) -> None:
        nonlocal told
        if time.monotonic() - told >= SECONDS_BETWEEN_LINES:
            told = time.monotonic()
            note(str(state))

    yield tell


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_OF_FILES
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)
