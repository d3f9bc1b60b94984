"""Progress in a terminal: one line, whatever its width, and nothing of it is left when notes or results follow."""

import re
from io import StringIO

import pytest
from rich.console import Console

from critical_neurons.cli import terminal
from critical_neurons.core.progress import Progress

LONG = "search-0.25, round 3 of 12, refitting a draft of the network"
CODES = re.compile(r"\x1b\[\??([\d;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")


def show_screen(written: str) -> list[str]:
    """What a terminal shows after these bytes."""
    rows, row, column = [""], 0, 0
    for number, code, move, text in CODES.findall(written):
        if text:
            rows[row] = (rows[row].ljust(column)[:column] + text + rows[row][column + len(text) :]).rstrip()
            column += len(text)
        elif move == "\r":
            column = 0
        elif move == "\n":
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif code == "A":
            row -= int(number)
        elif code == "K":
            rows[row] = ""
    return [each for each in rows if each]


@pytest.fixture
def console(monkeypatch):
    shown = Console(file=StringIO(), force_terminal=True, width=80, markup=False, emoji=False, highlight=False)
    monkeypatch.setattr(terminal, "open_console", lambda *, stderr=False: shown)
    return shown


def test_notes_stand_above_the_progress_and_nothing_is_left(console):
    with terminal.show_progress() as progress:
        terminal.note("Searching")
        progress(Progress("pricing layers", 3, 12, 95.0))
        terminal.note("Planning [all of it]")
        progress("bounding choices")
        assert show_screen(console.file.getvalue())[:2] == ["Searching", "Planning [all of it]"]
    assert show_screen(console.file.getvalue()) == ["Searching", "Planning [all of it]"]
    assert "\x1b[?25h" in console.file.getvalue()  # the cursor is shown again
    assert terminal.in_place == []


@pytest.mark.parametrize("width", [30, 44, 80, 200])
@pytest.mark.parametrize(
    "state",
    [
        LONG * 4,
        Progress(LONG, 3, 12, 95.0),
        Progress("distilling", 30, 4600, 15.0, "held-out loss 3.5e-05 after 3.6e-05"),
    ],
)
def test_progress_is_one_line(width, state):
    shown = Console(file=StringIO(), force_terminal=True, width=width)
    shown.print(terminal._draw(state, width))
    (line,) = show_screen(shown.file.getvalue())
    assert len(line) <= width - 2  # behind the spinner
    if isinstance(state, Progress) and width >= 80:
        assert f"{state.done} of {state.total}, " in line
        assert " s left" in line
        assert (state.note in line) == (width == 200 or not state.note)
