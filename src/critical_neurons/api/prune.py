"""The public `prune`: a smaller model by a plan, optionally refitted or distilled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from critical_neurons.core.batch import CALIBRATED_ON
from critical_neurons.core.distillation import Distillation, split_compensation
from critical_neurons.core.freed_memory import return_freed_memory
from critical_neurons.core.plan import Plan, check_plan
from critical_neurons.core.progress import Progress, Stage
from critical_neurons.core.settings import Compensation, DistanceName, OutputDistance, check_seed
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.readers import check_architecture, isolated
from critical_neurons.removal.augmentation import choose_augmentation
from critical_neurons.removal.distil import distil, hold_out
from critical_neurons.removal.imitation import Aim, StreamReader, find_readers
from critical_neurons.removal.refit.behind import refit_behind
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.removal.remove import keep_attributes, own_tensors, remove_units, zero_units
from critical_neurons.removal.rows import (
    Inputs,
    count_rows,
    digest_inputs,
    find_tensors,
    gather_inputs,
    match_model,
    take_rows,
)
from critical_neurons.removal.same_outputs import require_same, run_evenly, run_smaller
from critical_neurons.selection.distance import list_outputs, try_distance
from critical_neurons.structure import convert_to_double, copy_model, join_rows, unwrap

CHECKED_ROWS = 4
"""Rows on which the smaller model is compared with the masked one."""

LEAST_PROBABILITY = 1e-6


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
    progress: Callable[[Progress], None] = lambda progress: None,
) -> nn.Module:
    """A new, smaller module without the units that the plan removes; the given one is not changed.

    `example` are inputs of the model: a tensor or array, a tuple or dict of them, or an iterable of batches. On a few
    rows the smaller model is compared with the masked one in float64; without `example` and `calibration` it is not.

    `compensate`: the layers behind removed units are refitted on the inputs `calibration` (by default the example) to
    their original outputs. "least_squares" changes weights and biases; "bias" changes only biases, which without
    batch norms can do more harm than good. Both adjust the statistics of batch norms, and may add a bias to a layer
    without one.

    "distil", or `cn.Distillation(...)` for its settings, continues from least squares: all weights are trained for
    some minutes, without labels, to bring the outputs nearer to the model's, by `distance` as for `search`. An eighth
    of the inputs is held out from both; by the mean distance on these, plain and augmented, the weights returned are
    never worse than those of least squares. `seed` is that of the split and the batches. Ctrl-C leaves the best
    weights so far.

    `progress` receives how far refitting and training are, and the time left.

    Parameters and buffers keep `requires_grad` and your attributes; modules keep their hooks, which also run while
    the smaller module is made and checked. Hooks of tensors, which may expect the old shapes, and gradients are not
    copied; register them anew.

    The smaller module remembers, as digests in `calibrated_on`, the data points it was scored and refitted on, so
    that `compare` does not call them test data.

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
    return_freed_memory()
    if checked is not None:
        _check_alike(checked, inputs)
        _try_removal(source, plan, checked)
    return_freed_memory()
    smaller = own_tensors(remove_units(source, plan.structure, plan.stays), source)
    seen = getattr(source, CALIBRATED_ON, frozenset()) | plan.seen
    if refitted != "none":
        if inputs is None:
            raise InvalidSettingError(
                f"prune: compensate={compensate!r} needs inputs to refit on. Give example= or calibration=."
            )
        rows = join_rows(copy_model(source), match_model(inputs, source))
        check_inputs(rows, held_out=int(distillation is not None))
        held_apart = (rows, rows) if distillation is None else hold_out(rows, seed)
        fitted, held_out = (match_model(each, source) for each in held_apart)
        stage = Stage(progress, "refitting")
        smaller = refit_behind(copy_model(source), smaller, plan.structure, plan.stays, fitted, refitted, stage)
        if distillation is not None:
            readers = find_readers(smaller, plan.structure, plan.stays)
            smaller = distil(
                source,
                smaller,
                fitted,
                held_out,
                _choose_aim(source, rows, distillation, distance, readers),
                augment=distillation.augmentation or choose_augmentation(rows, distillation.augment),
                settings=distillation,
                seed=seed,
                report=progress,
            )
        seen |= set(digest_inputs(inputs))
    setattr(smaller, CALIBRATED_ON, seen)
    return keep_attributes(smaller, source)


def _try_removal(model: nn.Module, plan: Plan, inputs: Inputs) -> None:
    """Compare the smaller model with the masked one on a few rows. Only one of the two exists at a time."""
    copied = copy_model(model)
    inputs = join_rows(copied, match_model(inputs, model))
    rows = take_rows(inputs, torch.arange(min(CHECKED_ROWS, count_rows(inputs))))
    exact, rows = convert_to_double(copied, rows)
    del copied
    found = run_smaller(remove_units(exact, plan.structure, plan.stays), rows)
    masked = zero_units(exact, plan.structure, plan.stays, copy=lambda values: values)  # in the memory of the copy
    require_same(run_evenly(masked, rows), found)


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
    """The loss is the distance of `search`, for classes at a temperature at which all of them count."""
    if settings.loss is not None:
        return Aim(settings.loss)
    distance, given = try_distance(copy_model(model), inputs, name)
    outputs = list_outputs(given)
    logits = outputs[0].double().clamp(min=LEAST_PROBABILITY).log() if distance.logarithms else outputs[0].double()
    temperature = float(logits.std(correction=0)) or 1.0
    return Aim(
        lambda found, wanted: distance.measure(list_outputs(found), list_outputs(wanted), temperature),
        readers,
    )
