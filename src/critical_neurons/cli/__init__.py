"""Command line: arguments in, one call, table out. What needs torch is imported inside the commands."""

import io
import sys

from critical_neurons.cli import removing as _removing  # noqa: F401  adds its commands
from critical_neurons.cli import reproducing as _reproducing  # noqa: F401  adds its command
from critical_neurons.cli import smaller as _smaller  # noqa: F401  adds its commands
from critical_neurons.cli.commands import app


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # where λ cannot be written, a question mark stands for it
        sys.stdout.reconfigure(errors="replace")
    app()


__all__ = ["app", "main"]
