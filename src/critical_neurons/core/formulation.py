"""Formulation: settings of each kind of program, one type per formulation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeAlias, get_args

from critical_neurons.core.budget import Budget
from critical_neurons.core.settings import Plain, check_choice, check_flag, data, explained, is_amount, setting
from critical_neurons.core.span import Span
from critical_neurons.core.workers import HERE, Workers, check_workers
from critical_neurons.errors import InvalidInputError, InvalidSettingError

if TYPE_CHECKING:  # they need numpy, which `--help` has no time for
    from critical_neurons.core.bounds import Bounds
    from critical_neurons.core.plan import Plan
    from critical_neurons.core.scores import Scores

ObjectiveName: TypeAlias = Literal["balanced", "authors", "paper"]
FormulationName: TypeAlias = Literal["paper", "exact", "linearised"]
BoundsName: TypeAlias = Literal["interval", "backward"]
LossName: TypeAlias = Literal["auto", "softmax", "logistic", "squared"]

SPARSITY = ("loss_weight", "objective", "rescale")
"""Settings of the sparsity term, which a budget replaces."""

EXACT_STOP = (
    "stop: the exact formulation bounds the loss of the masked network, which an expansion of what follows the span "
    "does not. Leave stop out, or take 'paper' or 'linearised'."
)


@explained
@dataclass(frozen=True)
class Bisection(Plain):
    """For `loss_weight`: the largest one, by bisection, at which the mean score is at most `mean_score`.

    >>> half = cn.Paper(loss_weight=cn.Bisection(mean_score=0.5))
    >>> scores = cn.score(model, inputs[:3], labels[:3], formulation=half)
    >>> bool(scores.per_unit.mean() <= 0.5)
    True
    """

    mean_score: float = setting(MISSING, "The mean score to reach: the loss weight is found by bisection.")

    def __post_init__(self) -> None:
        self._settle("mean_score", Real, lambda value: 0 < value < 1, "a share between 0 and 1")


@explained
@dataclass(frozen=True)
class Lagrangian(Plain):
    """For `loss_weight`: the one that maximises the Lagrangian dual of the problem to minimise sparsity at a mean
    loss of at most the unpruned network's plus `loss_increase`. The scores meet that limit; `scores.dual` has the
    weight and the bound.

    >>> least = cn.Linearised(loss_weight=cn.Lagrangian(loss_increase=0.01))
    >>> scores = cn.score(model, inputs[:3], labels[:3], formulation=least)
    >>> scores.dual.softmax <= scores.dual.level
    True
    """

    loss_increase: float = setting(
        MISSING, "Allowed increase of the mean loss: the loss weight is found by the Lagrangian dual."
    )

    def __post_init__(self) -> None:
        self._settle("loss_increase", Real, is_amount, "a number of 0 or more")


@dataclass(frozen=True, kw_only=True)
class _Formulation(Plain):
    """Settings of all formulations: they minimise sparsity of the scores plus loss_weight times the softmax term."""

    name: ClassVar[FormulationName]
    summary: ClassVar[str]

    loss_weight: float | Bisection | Lagrangian = setting(
        5.0, "Weight of the loss against sparsity, the paper's lambda."
    )
    objective: ObjectiveName = setting(
        "balanced", "Every layer weighs the same; as in the authors' code; or as printed in the paper."
    )
    rescale: float = setting(2.0, "The constant c in the sparsity term.")
    loss: LossName = setting(
        "auto", "Softmax of several outputs, logistic of one, squared with targets; auto goes by the labels."
    )

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, LossName)
        if not isinstance(self.loss_weight, Bisection | Lagrangian):
            self._settle("loss_weight", Real, is_amount, "0 or more, cn.Bisection(...) or cn.Lagrangian(...)")
        check_choice("objective", self.objective, ObjectiveName)
        self._settle("rescale", Real, math.isfinite, "a finite number")

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, **super().to_dict()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        searched = data.get("loss_weight")
        if isinstance(searched, Mapping):
            kind = Bisection if "mean_score" in searched else Lagrangian
            data = {**data, "loss_weight": kind.from_dict(searched)}
        return cls(**data)

    def without_data(self) -> Self:
        """As recorded in files: without the user's own bounds and incumbent."""
        kept = (bool, int, float, str, Plain)
        left_out = [each for each in fields(self) if not isinstance(getattr(self, each.name), kept)]
        defaults: dict[str, Any] = {each.name: each.default for each in left_out}
        return replace(self, **defaults)


@dataclass(frozen=True, kw_only=True)
class _Gated(_Formulation):
    """Settings of formulations with gates."""

    integer: bool = setting(True, "Gates are 0 or 1; otherwise they are relaxed to values between.")
    bounds: BoundsName | Bounds = setting(
        "interval", "Interval arithmetic, or backward substitution: tighter and slower."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("integer", self.integer)
        if not isinstance(self.bounds, str):
            from critical_neurons.core.bounds import Bounds

            if isinstance(self.bounds, Bounds):
                return
        check_choice("bounds", self.bounds, BoundsName, ", or Bounds of your own")


@explained
@dataclass(frozen=True, kw_only=True)
class Paper(_Gated):
    """The paper's program: scores that keep the activation pattern of the unpruned network.

    `bounds` can also be your own `Bounds` for these inputs, which are tested before use.

    >>> authors = cn.Paper(loss_weight=5.0, input_radius=1e-5, integer=False, objective="authors")
    >>> scores = cn.score(model, inputs[:3], labels[:3], formulation=authors)
    >>> scores.gap <= 1e-4
    True
    """

    name = "paper"
    summary = "the paper's program"

    input_radius: float = setting(0.0, "Half width of the box around each input from which the bounds come.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settle("input_radius", Real, is_amount, "0 or more")


@explained
@dataclass(frozen=True, kw_only=True)
class Exact(_Gated):
    """The masked network itself at the inputs: with `binary` every feasible point is a forward pass of it, and the
    bound is one on its loss.

    `bounds` can also be your own `Bounds` for these inputs and all scores, which are tested before use. The result is
    never worse than the incumbent; `scores.incumbent` bounds how much better any 0/1 scores could be.

    >>> best = cn.Exact(binary=True)
    >>> scores = cn.score(model, inputs[:3], labels[:3], formulation=best, ignore=["0"])
    >>> scores.status, scores["3"]
    (<Status.OPTIMAL: 'optimal'>, array([0., 0., 0., 0., 0., 0., 0., 0.]))
    """

    name = "exact"
    summary = "the masked network itself"

    binary: bool = setting(False, "Scores are 0 or 1.")
    incumbent: Plan | Scores | None = data(
        "A plan, or scores (0 or 1 each, or found under a budget), to start from and to bound."
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("binary", self.binary)
        if self.incumbent is not None:
            self._check_incumbent()

    def _check_incumbent(self) -> None:
        from critical_neurons.core.plan import Plan
        from critical_neurons.core.scores import Scores

        if not isinstance(self.incumbent, Plan | Scores):
            raise InvalidInputError(
                f"incumbent: found {type(self.incumbent).__name__}. Accepted: a Plan, or Scores that say which units "
                "stay."
            )
        if not self.binary:
            raise InvalidSettingError(
                "incumbent: found with binary=False. A plan is a point of the program with scores 0 or 1 alone: "
                "binary=True."
            )
        if isinstance(self.loss_weight, Lagrangian):
            raise InvalidSettingError(
                "incumbent: judged at one loss weight, which cn.Lagrangian(...) searches for. Give a number."
            )


@explained
@dataclass(frozen=True, kw_only=True)
class Linearised(_Formulation):
    """Gates fixed as they are at the inputs, without constraints: fast, but a heuristic.

    >>> scores = cn.score(model, inputs, labels, formulation=cn.Linearised(loss_weight=10.0))
    >>> scores.status
    <Status.OPTIMAL: 'optimal'>
    """

    name = "linearised"
    summary = "gates fixed, a heuristic"


Formulation: TypeAlias = Paper | Exact | Linearised
FORMULATIONS: Mapping[str, type[Formulation]] = {kind.name: kind for kind in get_args(Formulation)}


@explained
@dataclass(frozen=True)
class ByClass:
    """One program per class. Their scores are averaged; `scores.parts` holds those of each class. Results do not
    depend on the workers, each of which uses one thread unless the solver's `threads` say more.

    >>> scores = cn.score(model, inputs[:6], labels[:6], formulation=cn.ByClass("linearised"))
    >>> len(scores.parts)
    3
    """

    formulation: Formulation | FormulationName = setting("paper", "The formulation of every program.")
    _: KW_ONLY
    workers: Workers = setting(HERE, "Workers that solve several programs at once.")
    earlier: Scores | None = data(
        "Earlier scores: classes in them with the same network, inputs and settings are not solved again."
    )

    def __post_init__(self) -> None:
        found = as_formulation(self.formulation)
        object.__setattr__(self, "formulation", found)
        check_workers(self.workers)
        if isinstance(found, Exact) and found.incumbent is not None:
            raise InvalidSettingError(
                "incumbent: goes with a single program. cn.ByClass averages those of all classes, and an average is "
                "no plan; leave out one of them."
            )
        if self.earlier is not None:
            self._check_earlier()

    def _check_earlier(self) -> None:
        from critical_neurons.core.scores import Scores

        if not isinstance(self.earlier, Scores):
            raise InvalidInputError(
                f"earlier: found {type(self.earlier).__name__}. Accepted: Scores, as cn.score gives them."
            )


def as_formulation(given: Formulation | FormulationName) -> Formulation:
    """A formulation given by name has default settings."""
    if isinstance(given, Formulation):
        return given
    if isinstance(given, str) and given in FORMULATIONS:
        return FORMULATIONS[given]()
    accepted = ", ".join(f"{name!r} or cn.{kind.__name__}(...)" for name, kind in FORMULATIONS.items())
    raise InvalidSettingError(f"formulation: found {given!r}. Accepted: {accepted}.")


def read_formulation(data: Mapping[str, Any]) -> Formulation:
    """From plain data, as `to_dict` gives it."""
    return FORMULATIONS[data["name"]].from_dict({name: value for name, value in data.items() if name != "name"})


def check_together(formulation: Formulation, budget: Budget | None, span: Span) -> None:
    """Raise on settings of different types that exclude each other."""
    if budget is not None and not isinstance(budget, Budget):
        raise InvalidSettingError(f"budget: found {budget!r}. Accepted: cn.Budget(units=0.5), of params or of macs.")
    without_effect = [name for name in SPARSITY if getattr(formulation, name) != getattr(Paper, name)]
    if budget is not None and without_effect:
        raise InvalidSettingError(
            f"budget: it takes the place of the sparsity term; leave out {', '.join(without_effect)}."
        )
    if span.stop is not None and isinstance(formulation, Exact):
        raise InvalidSettingError(EXACT_STOP)
