"""Command line: arguments in, one call, table out. What needs torch is imported inside the commands."""

import io
import sys

from critical_neurons.cli.commands import add_plugins, app


def main() -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):  # where λ cannot be written, a question mark stands for it
        sys.stdout.reconfigure(errors="replace")
    add_plugins()
    app()


__all__ = ["app", "main"]
