"""The command `demo`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from critical_neurons.cli.options import Json, Seed
from critical_neurons.cli.terminal import note, reports_errors, show, show_json, show_progress

DEMO_UNITS = 0.125
"""With a larger share, refitting compensates any removal, and there is nothing to compare."""


@reports_errors
def demo(
    save: Annotated[Path, typer.Option(help="The folder to write; an earlier demo in it is replaced.")] = Path(
        "critical_neurons_demo"
    ),
    units: Annotated[float, typer.Option(help="Keep at most this share of the units of every layer.")] = DEMO_UNITS,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Train a small network on scikit-learn's digits, make it smaller, measure, save and export it.

    Takes less than a minute. For comparison, equally many units are also removed at random. The folder holds both
    networks, the digits, the comparison and a report: enough to try the other commands.

    \b
    Example:
      critical-neurons demo --save demo
    """
    from critical_neurons.cli.digits import ORIGINAL, REPORT, TEST, TRAINING, check_demo, run_demo, save_demo
    from critical_neurons.cli.tables import demo_to_dict, report_demo

    check_demo(save)
    with show_progress() as progress:
        result = run_demo(seed=seed, units=units, progress=note, detail=progress)
        note("Saving, exporting and reading back")
        call = shlex.join(["critical-neurons", "demo", "--units", str(units), "--seed", str(seed)])
        read_back = save_demo(result, save, call=call)
    if as_json:
        show_json({**demo_to_dict(result, read_back), "save": str(save)})
        return
    show(report_demo(result, read_back))
    note(f"Written: {save}. Open {save / REPORT} in a browser to see it.")
    training, original, test = (shlex.quote(str(save / name)) for name in (TRAINING, ORIGINAL, TEST))
    note(
        f"Next: critical-neurons compress critical_neurons.cli.digits:small_network {training} "
        f"--weights {original} --test-data {test} --max-drop 0.01 --save smaller"
    )
