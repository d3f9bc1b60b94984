"""Progress bars: one for all cells, and one for each running training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from critical_neurons.cli.terminal import note, open_console, show_progress, shows_lines


@contextmanager
def show_bars(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[str, int, int], None]]]:
    """A bar for the whole and one for each running task, such as a training; in a log file, lines.

    Yields two functions: one for the name of each finished task, one for the name, steps done and total steps of a
    running task.
    """
    if shows_lines():
        done = 0

        def finish(name: str) -> None:
            nonlocal done
            done += 1
            note(f"{done} of {total}: {name}")

        with show_progress() as show:
            yield finish, lambda name, step, of: show(f"{name}: {step} of {of}")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=open_console(stderr=True),
    ) as bars:
        whole = bars.add_task("all", total=total)
        under_way: dict[str, Any] = {}

        def advance(name: str) -> None:
            bars.advance(whole)

        def step_on(name: str, step: int, of: int) -> None:
            if name not in under_way:
                under_way[name] = bars.add_task(name, total=of)
            bars.update(under_way[name], completed=step)
            if step == of:
                bars.remove_task(under_way.pop(name))

        yield advance, step_on
