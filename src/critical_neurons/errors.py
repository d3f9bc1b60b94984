"""Errors: every exception the package raises on purpose.

All derive from `CriticalNeuronsError`; each also inherits the built-in a caller would expect. A message
says where, what was found, what is accepted and what to do.
"""

from __future__ import annotations


class CriticalNeuronsError(Exception):
    """Root of every error raised by critical_neurons."""


class UnreadableModelError(CriticalNeuronsError, TypeError):
    """A model that cannot be described as a network of affine maps and ReLUs."""


class InvalidInputError(CriticalNeuronsError, ValueError):
    """Inputs, labels or an example that do not fit the model."""


class InvalidSettingError(CriticalNeuronsError, ValueError):
    """A setting outside its range, or an unknown name."""


class PlanMismatchError(CriticalNeuronsError, ValueError):
    """A plan or scores that belong to another network."""


class PruningError(CriticalNeuronsError, RuntimeError):
    """The smaller network does not behave like the masked one."""


class ExportError(CriticalNeuronsError, RuntimeError):
    """A model that cannot be exported, or whose export does not behave like it."""


class ConversionError(CriticalNeuronsError, RuntimeError):
    """An ONNX network that cannot be converted, or whose conversion does not behave like it."""


class SolverError(CriticalNeuronsError, RuntimeError):
    """A solver that failed, or cannot solve this kind of program."""


class InfeasibleProgramError(SolverError):
    """A program that no scores satisfy: a budget too small for its rows."""


class MissingExtraError(CriticalNeuronsError, ImportError):
    """An optional dependency that is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed. Install it with: pip install 'critical_neurons[{extra}]'")
        self._given = package, extra

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        """Makes it picklable, so that it can be raised in another process."""
        return type(self), self._given


class InvalidFileError(CriticalNeuronsError, ValueError):
    """A file that cannot be read as what it should be."""


class OutputError(CriticalNeuronsError, OSError):
    """A path that cannot be written."""


class WorkersError(CriticalNeuronsError, RuntimeError):
    """Workers that cannot be reached, were lost, or would give other results."""


def first_line(error: BaseException) -> str:
    """The first line of another library's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
