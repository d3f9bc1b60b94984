"""The public `prune`: model and plan to a smaller model, refitted if asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from critical_neurons.core.batch import CALIBRATED_ON
from critical_neurons.core.plan import Plan, check_plan
from critical_neurons.core.settings import Compensation, check_compensation
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.readers import check_architecture, on_cpu
from critical_neurons.removal.refit.behind import refit_behind
from critical_neurons.removal.remove import check_removal, own_tensors, remove_units, zero_units
from critical_neurons.removal.rows import (
    count_rows,
    digest_inputs,
    find_tensors,
    gather_inputs,
    match_model,
    take_rows,
)
from critical_neurons.structure import convert_to_double, copy_model, join_rows, unwrap

CHECKED_ROWS = 4
"""On which the smaller model is compared with the masked one."""


@on_cpu
def prune(
    model: nn.Module,
    plan: Plan,
    example: Any = None,
    *,
    compensate: Compensation = "none",
    calibration: Any = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> nn.Module:
    """A new, smaller module without the units the plan removes; the given one stays as it is.

    `example` are inputs as the model takes them: a tensor or array, a tuple or dict of them, or an iterable of
    batches. On a few rows of it the smaller model is compared with the masked one in float64; without an example or
    `calibration` it is not.

    `compensate`: the modules behind what was removed are refitted on the inputs `calibration` (the example, unless
    given) to compute what they did: "least_squares" changes weights and biases, "bias" biases alone, which without
    batch norms can do more harm than good; both move the statistics of batch norms along. A layer without a bias may
    be given one. `progress` is told how many modules are done, and of how many. The smaller module remembers, as
    digests in `calibrated_on`, the data points it was scored and refitted on: `compare` does not take them for test
    data.
    """
    check_compensation(compensate)
    check_plan(plan)
    source = unwrap(model)
    check_architecture(source, plan.architecture, "the plan was")
    given = None if example is None else gather_inputs(example)
    inputs = given if calibration is None else gather_inputs(calibration)
    checked = inputs if given is None else given
    if checked is not None:
        _check_alike(checked, inputs)
        copied = copy_model(source)
        checked = join_rows(copied, match_model(checked, source))
        rows = take_rows(checked, torch.arange(min(CHECKED_ROWS, count_rows(checked))))
        exact, rows = convert_to_double(copied, rows)
        masked = zero_units(exact, plan.structure, plan.stays)
        check_removal(masked, remove_units(exact, plan.structure, plan.stays), rows)
    smaller = own_tensors(remove_units(source, plan.structure, plan.stays), source)
    seen = getattr(source, CALIBRATED_ON, frozenset()) | plan.seen
    if compensate != "none":
        if inputs is None:
            raise InvalidSettingError(
                f"prune: compensate={compensate!r} needs inputs to refit on. Give example= or calibration=."
            )
        rows = join_rows(copy_model(source), match_model(inputs, source))
        smaller = refit_behind(source, smaller, plan.structure, plan.stays, rows, compensate, progress)
        seen |= set(digest_inputs(inputs))
    setattr(smaller, CALIBRATED_ON, seen)
    return smaller


def _check_alike(example: Any, calibration: Any) -> None:
    shapes = [[tuple(values.shape[1:]) for values in find_tensors(inputs)] for inputs in (example, calibration)]
    if shapes[0] != shapes[1]:
        found, accepted = (", ".join(map(str, each)) for each in (shapes[1], shapes[0]))
        raise InvalidInputError(
            f"calibration: found inputs of shape {found}. Accepted: {accepted}, as of the example."
        )
