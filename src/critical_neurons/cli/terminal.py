"""Terminal: tables and JSON on standard output; notes, progress and errors on standard error."""

from __future__ import annotations

import functools
import inspect
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer

from critical_neurons.cli.ending import BAD_INPUT, commands, in_place
from critical_neurons.core.progress import Progress
from critical_neurons.errors import CriticalNeuronsError, InvalidSettingError
from critical_neurons.interrupted_start import INTERRUPTED

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SECONDS_BETWEEN_LINES = 5.0
"""Seconds between progress lines in a log file; a terminal shows every step."""

WIDTH_OF_FILES = 140
"""Width in columns if the output is not a terminal."""

WIDTH_OF_BARS, SHORTEST_NAME = 18, 8

Parameters = ParamSpec("Parameters")

LOUDNESS = tuple(
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option])
    for name, option in (
        ("quiet", typer.Option("--quiet", "-q", help="No notes and no progress: only results and errors.")),
        ("verbose", typer.Option("--verbose", "-v", help="Every step on its own line, with the time.")),
    )
)

_output: dict[str, Any] = {"notes": True, "everything": False, "since": 0.0}
"""What the running command writes to standard error, and when it started."""


def reports_errors(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """The user's mistakes end in one sentence and exit code 2, an interrupt in 130; bugs keep their traceback.

    The command takes --quiet and --verbose as well.
    """

    @functools.wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        quiet, verbose = kwargs.pop("quiet", False), kwargs.pop("verbose", False)
        commands.append(command.__name__)
        try:
            if quiet and verbose:
                raise InvalidSettingError("--quiet and --verbose: give one of them.")
            _output.update(notes=not quiet, everything=bool(verbose), since=time.monotonic())
            command(*args, **kwargs)
        except CriticalNeuronsError as error:
            if kwargs.get("as_json"):
                show_json({"error": {"type": type(error).__name__, "message": str(error)}})
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(BAD_INPUT) from None
        except KeyboardInterrupt:
            note("Interrupted.")
            raise typer.Exit(INTERRUPTED) from None
        finally:
            commands.pop()
            _output.update(notes=True, everything=False)

    signature = inspect.signature(command, eval_str=True)
    own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in signature.parameters.values()]
    run.__signature__ = signature.replace(parameters=[*own, *LOUDNESS])  # type: ignore[attr-defined]
    run.__annotations__ = {each.name: each.annotation for each in (*own, *LOUDNESS)}
    return run


def shows_lines() -> bool:
    """Whether progress is shown as lines, or not at all, rather than in place."""
    return not open_console(stderr=True).is_terminal or _output["everything"] or not _output["notes"]


def name_command() -> str:
    """The running command, as it was typed."""
    return shlex.join(["critical-neurons", *sys.argv[1:]])


def show(renderable: RenderableType) -> None:
    open_console().print(renderable)


def show_json(content: Any) -> None:
    typer.echo(json.dumps(content, indent=2))


def note(text: str) -> None:
    if _output["notes"]:
        time_passed = f"{time.monotonic() - _output['since']:.1f} s  " if _output["everything"] else ""
        if in_place:  # above the progress
            in_place[-1].print(f"{time_passed}{text}", soft_wrap=True)
        else:
            typer.echo(f"{time_passed}{text}", err=True)


@contextmanager
def show_progress() -> Iterator[Callable[[object], None]]:
    """A line that shows the current state, such as a solver's step, with a bar if there is something to count; in a
    log file a new line every few seconds."""
    console = open_console(stderr=True)
    if _output["everything"] or not _output["notes"]:
        yield lambda state: note(str(state))
        return
    if console.is_terminal:
        with console.status("starting") as status:
            in_place.append(console)
            try:
                yield lambda state: status.update(_draw(state, console.width))
            finally:
                in_place.remove(console)
        return
    written = time.monotonic()

    def write(state: object) -> None:
        nonlocal written
        if time.monotonic() - written >= SECONDS_BETWEEN_LINES:
            written = time.monotonic()
            note(str(state))

    yield write


def _draw(state: object, width: int) -> RenderableType:
    """One line: a bar between the name of the stage and the time left, if there is something to count and room for
    it. What does not fit is cut off the name."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    width -= 2  # the spinner
    details = str(state).removeprefix(f"{state.stage}: ") if isinstance(state, Progress) else ""
    counted = details.removesuffix(f", {state.note}") if isinstance(state, Progress) and state.note else details
    room = width - WIDTH_OF_BARS - len(counted) - 2
    if not isinstance(state, Progress) or not state.total or room < SHORTEST_NAME:
        line = Text(str(state))
        line.truncate(width, overflow="ellipsis")
        return line
    name = Text(state.stage)
    name.truncate(room, overflow="ellipsis")
    row = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=state.total, completed=state.done, width=WIDTH_OF_BARS)
    row.add_row(name, bar, details if len(details) - len(counted) <= room - name.cell_len else counted)
    return row


def open_console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else WIDTH_OF_FILES
    return Console(file=stream, markup=False, emoji=False, highlight=False, width=width)
