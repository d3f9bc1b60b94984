"""Solver: settings of the solver and its limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from numbers import Integral, Real
from typing import Any

from critical_neurons.core.settings import Plain, check_seed, explained, is_amount, setting
from critical_neurons.errors import InvalidSettingError


@explained
@dataclass(frozen=True)
class Solver(Plain):
    """The solver and its limits. When a limit is reached, as after Ctrl-C, the best scores so far are returned.

    "auto" is "highs" or, without integer gates, "barrier", the library's own interior point method, for many inputs
    or units, and "first-order" for very many undecided gates or a steep loss; "cvxpy:NAME" solves the paper's program
    as printed, with every activation and gate, and checks the time only between its own steps, which are long in
    large programs.

    >>> scores = cn.score(model, inputs[:3], labels[:3], solver=cn.Solver("highs", time_limit=60, gap=1e-3))
    >>> scores.gap <= 1e-3
    True
    """

    name: str = setting("auto", "auto, highs, barrier, first-order, scip, or cvxpy:NAME.", option="solver")
    _: KW_ONLY
    options: Mapping[str, Any] = setting(
        dict, "name=value, passed to the solver; may be repeated.", option="solver_option"
    )
    time_limit: float = setting(300.0, "Time limit in seconds; the best scores so far are used.")
    gap: float = setting(1e-4, "Relative gap at which the solver stops.")
    threads: int | None = setting(None, "Threads of the solver.")
    seed: int = setting(0, "Seed of every random choice.")

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InvalidSettingError(f"solver: found {self.name!r}. Accepted: a name such as 'highs'.")
        if not isinstance(self.options, Mapping) or not all(isinstance(name, str) for name in self.options):
            raise InvalidSettingError(f"options: found {self.options!r}. Accepted: values by the names of options.")
        object.__setattr__(self, "options", dict(self.options))
        self._settle("time_limit", Real, lambda value: value > 0, "a number of seconds above 0")
        self._settle("gap", Real, is_amount, "0 or more")
        if self.threads is not None:
            self._settle("threads", Integral, lambda value: value >= 1, "a whole number of at least 1, or None")
        object.__setattr__(self, "seed", check_seed(self.seed))


def as_solver(given: Solver | str) -> Solver:
    """A solver given by name has default settings."""
    if isinstance(given, Solver):
        return given
    if isinstance(given, str):
        return Solver(given)
    raise InvalidSettingError(f"solver: found {given!r}. Accepted: a name such as 'highs', or cn.Solver(...).")
