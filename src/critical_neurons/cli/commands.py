"""The commands, in the order in which `--help` lists them, and those of other packages."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Annotated

import typer

from critical_neurons.cli.compress import compress
from critical_neurons.cli.demo import demo
from critical_neurons.cli.doctor import doctor
from critical_neurons.cli.evaluate import evaluate
from critical_neurons.cli.export import export
from critical_neurons.cli.inspect import inspect
from critical_neurons.cli.lossless import lossless
from critical_neurons.cli.prune import prune
from critical_neurons.cli.report import report
from critical_neurons.cli.score import score
from critical_neurons.cli.sweep import sweep
from critical_neurons.cli.terminal import show
from critical_neurons.core.environment import describe_versions

PLUGINS = "critical_neurons.commands"
"""The entry point group for commands of other packages."""

app = typer.Typer(
    name="critical-neurons",
    help="Score the units of a trained network with a mixed integer program, and remove the unimportant ones.\n\n"
    "\b\nExamples:\n"
    "  critical-neurons demo\n"
    "  critical-neurons compress lenet5 train.npz --weights lenet5.pt --macs 0.5 --save smaller\n"
    "  critical-neurons compress model.onnx train.npz --macs 0.5 --output smaller.onnx\n"
    "  critical-neurons sweep lenet5 train.npz --weights lenet5.pt --macs 0.8,0.6,0.4,0.2 --folder sweep\n"
    "  critical-neurons inspect lenet5\n"
    "  critical-neurons score lenet5 ylecun/mnist --weights lenet5.pt --resize 32 --channels 3 --output scores.json\n"
    "  critical-neurons prune lenet5 --weights lenet5.pt --scores scores.json --threshold 0.1 --save smaller\n"
    "  critical-neurons lossless lenet5 --weights lenet5.pt --box 0,1 --save smaller\n"
    "  critical-neurons evaluate lenet5 smaller --weights lenet5.pt --data test.npz\n"
    "  critical-neurons report smaller --output report.html\n"
    "  critical-neurons export lenet5 smaller --output smaller.onnx",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _show_versions(wanted: bool) -> None:
    if wanted:
        show(", ".join(f"{name} {number}" for name, number in describe_versions("torch", "highspy").items()))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Print versions and leave."),
    ] = False,
) -> None:
    """Options of the tool itself."""


COMMANDS: tuple[Callable[..., None], ...] = (
    demo,
    inspect,
    score,
    prune,
    compress,
    sweep,
    lossless,
    evaluate,
    report,
    export,
    doctor,
)
"""In the order of `--help`."""

for _command in COMMANDS:
    app.command()(_command)


def add_plugins() -> None:
    """Add the commands of other packages, found by their entry points."""
    for plugin in entry_points(group=PLUGINS):
        app.command(plugin.name)(plugin.load())
