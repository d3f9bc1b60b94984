"""Pipeline: the public steps around scoring and planning: a look before, a program solved, a model made smaller."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.batch import CALIBRATED_ON, digest_rows, gather_batch
from critical_neurons.compensating import Refit, Stop, refit_modules
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.network import Bools, Network
from critical_neurons.plans import Plan, check_plan
from critical_neurons.program import Program
from critical_neurons.pruning import check_removal, hold_at_zero, remove_units, units_that_stay
from critical_neurons.reading import (
    check_architecture,
    copy_for_reading,
    on_cpu,
    read_network,
    run_alike,
    trace_model,
    unwrap,
)
from critical_neurons.settings import as_names
from critical_neurons.solution import Solution, Step
from critical_neurons.solving import Limits, find_solver, ignore_progress
from critical_neurons.span import Span

Compensation: TypeAlias = Literal["none", "bias", "least_squares"]


@on_cpu
def inspect(
    model: nn.Module,
    example: Any,
    *,
    ignore: Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
) -> Network:
    """What would be scored and what would not, with reasons: print the result. `example` is a batch of inputs.

    `ignore`, `start` and `stop` as in `score`.
    """
    rows = torch.from_numpy(gather_batch(example).inputs)
    return read_network(model, rows, ignore=as_names(ignore), start=start, stop=stop)


def solve(
    program: Program,
    *,
    solver: str = "auto",
    time_limit: float = 300.0,
    gap: float = 1e-4,
    threads: int | None = None,
    seed: int = 0,
    solver_options: Mapping[str, Any] | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Solution:
    """Solve a program of `encode`."""
    found, options = find_solver(solver), dict(solver_options or {})
    found.check_options(options)
    return found.solve(program, Limits(time_limit, gap, threads, seed, options), progress or ignore_progress)


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


def check_compensation(compensate: str) -> None:
    if compensate not in get_args(Compensation):
        accepted = ", ".join(map(repr, get_args(Compensation)))
        raise InvalidSettingError(f"compensate: found {compensate!r}. Accepted: {accepted}.")


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


@on_cpu
def mask(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model, of the same size, with the activations of the removed units held at zero."""
    check_plan(plan)
    source = unwrap(model)
    check_architecture(source, plan.architecture, "the plan was")
    return hold_at_zero(source, plan)
