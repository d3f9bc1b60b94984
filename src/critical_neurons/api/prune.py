"""The public `prune`: model and plan to a smaller model, refitted if asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from critical_neurons.core.batch import CALIBRATED_ON
from critical_neurons.core.distillation import Distillation, split_compensation
from critical_neurons.core.plan import Plan, check_plan
from critical_neurons.core.settings import Compensation, DistanceName, OutputDistance, check_seed
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.readers import check_architecture, isolated
from critical_neurons.removal.augmentation import choose_augmentation
from critical_neurons.removal.distil import distil
from critical_neurons.removal.imitation import Aim, StreamReader, find_readers
from critical_neurons.removal.refit.behind import refit_behind
from critical_neurons.removal.remove import check_removal, keep_attributes, own_tensors, remove_units, zero_units
from critical_neurons.removal.rows import (
    Inputs,
    call_model,
    count_numbers,
    count_rows,
    digest_inputs,
    find_tensors,
    gather_inputs,
    match_model,
    take_rows,
)
from critical_neurons.selection.distance import choose_distance, list_outputs
from critical_neurons.structure import convert_to_double, copy_model, join_rows, unwrap

CHECKED_ROWS = 4
"""On which the smaller model is compared with the masked one."""

LEAST_PROBABILITY = 1e-6

FEW_ROWS = 64
"""Inputs whose outputs tell how outputs are compared."""


@isolated
def prune(
    model: nn.Module,
    plan: Plan,
    example: Any = None,
    *,
    compensate: Compensation | Distillation = "none",
    calibration: Any = None,
    distance: DistanceName | OutputDistance = "auto",
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
    detail: Callable[[str], None] = lambda text: None,
) -> nn.Module:
    """A new, smaller module without the units the plan removes; the given one stays as it is.

    `example` are inputs as the model takes them: a tensor or array, a tuple or dict of them, or an iterable of
    batches. On a few rows of it the smaller model is compared with the masked one in float64; without an example or
    `calibration` it is not.

    `compensate`: the modules behind what was removed are refitted on the inputs `calibration` (the example, unless
    given) to compute what they did: "least_squares" changes weights and biases, "bias" biases alone, which without
    batch norms can do more harm than good; both move the statistics of batch norms along. A layer without a bias may
    be given one. `progress` is told how many modules are done, and of how many.

    "distil", or `cn.Distillation(...)` for other settings than its own, goes on from least squares: all weights are
    trained for some minutes, without labels, to bring the outputs nearer to the model's, by `distance` as for
    `search`. The weights are those that do best on inputs held out from this training, never worse there than those
    of least squares. `seed` is that of the batches; `detail` is told of the time left. Ctrl-C takes the best so far.

    The smaller module remembers, as digests in `calibrated_on`, the data points it was scored and refitted on:
    `compare` does not take them for test data.

    >>> smaller = cn.prune(model, plan, inputs, compensate="least_squares")
    >>> smaller[0].out_channels, smaller[3].out_features
    (2, 4)
    """
    refitted, distillation = split_compensation(compensate)
    check_seed(seed)
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
    if refitted != "none":
        if inputs is None:
            raise InvalidSettingError(
                f"prune: compensate={compensate!r} needs inputs to refit on. Give example= or calibration=."
            )
        rows = join_rows(copy_model(source), match_model(inputs, source))
        smaller = refit_behind(source, smaller, plan.structure, plan.stays, rows, refitted, progress)
        if distillation is not None:
            readers = find_readers(smaller, plan.structure, plan.stays)
            smaller = distil(
                source,
                smaller,
                rows,
                _choose_aim(source, rows, distillation, distance, readers),
                augment=distillation.augmentation or choose_augmentation(rows, distillation.augment),
                settings=distillation,
                seed=seed,
                report=detail,
            )
        seen |= set(digest_inputs(inputs))
    setattr(smaller, CALIBRATED_ON, seen)
    return keep_attributes(smaller, source)


def _check_alike(example: Any, calibration: Any) -> None:
    shapes = [[tuple(values.shape[1:]) for values in find_tensors(inputs)] for inputs in (example, calibration)]
    if shapes[0] != shapes[1]:
        found, accepted = (", ".join(map(str, each)) for each in (shapes[1], shapes[0]))
        raise InvalidInputError(
            f"calibration: found inputs of shape {found}. Accepted: {accepted}, as of the example."
        )


def _choose_aim(
    model: nn.Module,
    inputs: Inputs,
    settings: Distillation,
    name: DistanceName | OutputDistance,
    readers: tuple[StreamReader, ...],
) -> Aim:
    """The distance by which `search` compares outputs, of classes at the temperature at which all of them count; what
    is taken is judged by decisions, as in `search`."""
    if settings.loss is not None:
        return Aim(settings.loss, settings.loss)
    few = take_rows(inputs, torch.arange(min(FEW_ROWS, count_rows(inputs))))
    with torch.no_grad():
        given = call_model(copy_model(model), few)
    distance, outputs = choose_distance(given, name, count_numbers(inputs)), list_outputs(given)
    logits = outputs[0].double().clamp(min=LEAST_PROBABILITY).log() if distance.logarithms else outputs[0].double()
    temperature = float(logits.std(correction=0)) or 1.0
    return Aim(
        lambda found, wanted: distance.measure(list_outputs(found), list_outputs(wanted), temperature),
        lambda found, wanted: distance.miss(list_outputs(found), list_outputs(wanted)),
        readers,
    )
