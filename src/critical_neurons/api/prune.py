"""The public `prune`: model and plan to a smaller model, refitted if asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.batch import CALIBRATED_ON, digest_rows, gather_batch
from critical_neurons.core.network import Bools, Network
from critical_neurons.core.plan import Plan, check_plan
from critical_neurons.core.settings import Compensation, check_compensation
from critical_neurons.core.span import Span
from critical_neurons.errors import InvalidInputError
from critical_neurons.readers import (
    check_architecture,
    copy_for_reading,
    on_cpu,
    read_network,
    run_alike,
    trace_model,
    unwrap,
)
from critical_neurons.removal.mask import hold_at_zero
from critical_neurons.removal.refit.least_squares import Refit
from critical_neurons.removal.refit.stream import Stop, refit_modules
from critical_neurons.removal.remove import check_removal, remove_units, units_that_stay


@on_cpu
def prune(
    model: nn.Module,
    plan: Plan,
    example: Any,
    *,
    compensate: Compensation = "none",
    calibration: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> nn.Module:
    """A new, smaller module without the units the plan removes; the given one stays as it is.

    `example` is a batch of inputs. On a few rows of it the smaller model is compared with the masked one in float64.

    `compensate`: the modules behind what was removed are refitted on the inputs `calibration` (the example, unless
    given) to compute what they did: "least_squares" changes weights and biases (biases alone of layers with more than
    8192 weights for a unit), "bias" biases alone, which without batch norms can do more harm than good; both move the
    statistics of batch norms along. A layer without a bias may be given one. `progress` is told how many modules are
    done, and of how many. The smaller module remembers, as digests in `calibrated_on`, the data points it was scored
    and refitted on: `compare` does not take them for test data.
    """
    check_compensation(compensate)
    check_plan(plan)
    source = unwrap(model)
    check_architecture(source, plan.architecture, "the plan was")
    given = torch.from_numpy(gather_batch(example).inputs)
    rows = given[:4]
    network = read_network(source, rows, start=plan.span.start, stop=plan.span.stop)
    exact = copy_for_reading(source)
    check_removal(hold_at_zero(exact, plan), remove_units(exact, network, plan), rows)
    smaller = remove_units(source, network, plan)
    seen = getattr(source, CALIBRATED_ON, frozenset()) | plan.seen
    if compensate != "none":
        inputs = given if calibration is None else torch.from_numpy(gather_batch(calibration).inputs)
        if inputs.shape[1:] != rows.shape[1:]:
            raise InvalidInputError(
                f"calibration: found inputs of shape {tuple(inputs.shape[1:])}. Accepted: {tuple(rows.shape[1:])}, "
                "as of the example."
            )
        stops = _find_stops(network, units_that_stay(network, plan))
        smaller = _refit((source, smaller), plan.span, stops, inputs, compensate, progress)
        seen |= set(digest_rows(inputs.numpy()))
    setattr(smaller, CALIBRATED_ON, seen)
    return smaller


def _find_stops(network: Network, stays: Bools) -> list[Stop]:
    """The modules that read, directly or not, what is no longer there."""
    firsts = [
        place for place, wiring in enumerate(network.wirings) if wiring.kernel and not stays[wiring.inputs].all()
    ]
    behind = network.wirings[firsts[0] :] if firsts else ()
    return [Stop(wiring.module, torch.from_numpy(np.flatnonzero(stays[wiring.outputs]))) for wiring in behind]


def _refit(
    pair: tuple[nn.Module, nn.Module],
    span: Span,
    stops: list[Stop],
    inputs: Tensor,
    method: Refit,
    progress: Callable[[int, int], None],
) -> nn.Module:
    """A refitted copy of the smaller one of an original and a smaller model."""
    parameter = next(pair[0].parameters())
    original, fitted = (copy.deepcopy(each).cpu().eval() for each in pair)
    traced, _ = trace_model(original, span)
    refit_modules(traced, run_alike(traced, fitted), stops, inputs.to(parameter.dtype), method, progress)
    for module, old in zip(fitted.modules(), pair[1].modules(), strict=True):
        module.training = old.training
    return fitted.to(parameter.device)
