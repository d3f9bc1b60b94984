"""Formulations: network, bounds and labels to program. One file per formulation; this one picks it by name."""

from __future__ import annotations

from critical_neurons.core.bounds import Bounds
from critical_neurons.core.formulation import EXACT_STOP, FormulationName
from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.loss import Loss, as_loss, check_outputs
from critical_neurons.core.network import Network
from critical_neurons.core.program import Program
from critical_neurons.core.structure import Ints
from critical_neurons.errors import InvalidSettingError
from critical_neurons.formulations.exact import ExactGates
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.linearised import LinearisedGates
from critical_neurons.formulations.objective import BudgetRows, Goal, Objective, budget_network, find_floor
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.formulations.reduced_space import encode_eliminated

__all__ = [
    "BudgetRows",
    "Goal",
    "Objective",
    "budget_network",
    "encode",
    "encode_literal",
    "encode_unchecked",
    "find_floor",
]


def encode(
    network: Network,
    bounds: Bounds,
    labels: Ints | Loss,
    goal: Goal | None = None,
    *,
    formulation: FormulationName = "paper",
    integer: bool = True,
    binary: bool = False,
    tail: Tail | None = None,
) -> Program:
    """The eliminated program of a formulation. The goal is an `Objective` (balanced, λ = 5) or a `BudgetRows`.

    `labels`: classes, for the softmax loss, or another loss.

    `paper` takes bounds at any radius, `linearised` at radius 0, `exact` those of `bound_network(..., pruned=True)`.
    They may be your own: that they hold is tried at the data points, and if `pruned` with units removed.
    A network that was read with `stop` needs the `tail` that follows it.

    >>> network = cn.read_network(model, inputs)
    >>> bounds = cn.bound_network(network, inputs[:3].double().numpy(), pruned=True)
    >>> program = cn.encode(network, bounds, labels[:3].numpy(), formulation="exact", binary=True)
    >>> program.column_count
    64
    """
    bounds.check(network)
    return encode_unchecked(
        network, bounds, labels, goal, formulation=formulation, integer=integer, binary=binary, tail=tail
    )


def encode_unchecked(
    network: Network,
    bounds: Bounds,
    labels: Ints | Loss,
    goal: Goal | None = None,
    *,
    formulation: FormulationName,
    integer: bool = True,
    binary: bool = False,
    tail: Tail | None = None,
) -> Program:
    """As `encode`, for bounds that `bound_network` has just made for this network."""
    wanted = goal or Objective()
    _check_tail(network, tail, formulation)
    check_outputs(as_loss(labels), network.class_count if tail is None else tail.class_count)
    if (formulation == "exact") != bounds.pruned or (formulation != "paper" and bounds.radius):
        raise InvalidSettingError(
            f"bounds: found radius={bounds.radius}, pruned={bounds.pruned}. bound_network(..., pruned=True) goes "
            "with 'exact' and with it alone, a radius above 0 with 'paper' alone."
        )
    if formulation == "linearised" and not all(interval.is_point for interval in bounds.before_relu.values()):
        raise InvalidSettingError("bounds: 'linearised' takes points, the gates as they are at the inputs.")
    given = network, bounds, labels, wanted
    match formulation:
        case "paper":
            return encode_paper(*given, integer=integer, tail=tail)
        case "exact":
            return encode_eliminated(*given, ExactGates(binary), integer=integer, binary=binary)
        case "linearised":
            return encode_eliminated(*given, LinearisedGates(), integer=False, has_rows=False, tail=tail)
        case _:
            raise InvalidSettingError(
                f"formulation: found {formulation!r}. Accepted: 'paper', 'exact', 'linearised'."
            )


def _check_tail(network: Network, tail: Tail | None, formulation: FormulationName) -> None:
    """A tail goes with a network that was read with `stop`, and with no other."""
    if (network.span.stop is None) != (tail is None):
        raise InvalidSettingError(
            f"tail: found {'none' if tail is None else 'one'} for a network that ends with "
            f"{network.span.stop or 'its logits'}. It goes with networks that were read with stop=."
        )
    if tail is not None and formulation == "exact":
        raise InvalidSettingError(EXACT_STOP)
