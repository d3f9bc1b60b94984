"""Command line: arguments in, one call, table out. What needs torch is imported inside the commands."""

from critical_neurons.cli.ending import run_to_an_end


def main() -> None:
    """The command line tool. Commands are imported where an interrupt is met."""
    run_to_an_end(_run)


def _run() -> None:
    from critical_neurons.cli.commands import add_plugins, app
    from critical_neurons.cli.memory import reuse_freed_memory

    reuse_freed_memory()
    add_plugins()
    app()


__all__ = ["main"]
