"""Finding a structure: one labelled run of a copy of the model, and a trial removal that tests what it says."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import NO_UNIT, Fingerprint, Structure
from critical_neurons.errors import (
    InvalidInputError,
    InvalidSettingError,
    UnreadableModelError,
    first_line,
)
from critical_neurons.removal.remove import FAILURES, run_evenly
from critical_neurons.removal.rows import (
    Inputs,
    call_model,
    count_rows,
    find_tensors,
    map_inputs,
    match_model,
    take_rows,
)
from critical_neurons.structure.assembly import assemble
from critical_neurons.structure.run import LabelledRun
from critical_neurons.structure.trial import Trial, find_line

EXAMPLE_ROWS = 2
"""More than one, so that a forward that touches the batch axis shows."""

MOST_ROWS = 4096
"""A model that does not run on a few of so many is run on all."""


@torch.inference_mode(False)  # there a labelled run sees other calls
@torch.no_grad()
def find_structure(model: nn.Module, inputs: Inputs, *, ignore: Collection[str] = ()) -> Structure:
    """What can be removed from the model, found by running a copy of it on a few rows of the inputs.

    Layers in `ignore` lose nothing. What the labelled run says is tried: some units of every group are removed, and
    the smaller model is compared with the masked one. Groups that do not pass, as when a size is written into the
    forward, stay, with the reason.
    """
    source = unwrap(model)
    check_model(source)
    count = count_rows(inputs)
    if count == 0:
        raise InvalidInputError("inputs: found no rows. Give at least one.")
    inputs = match_model(inputs, source)
    rows = take_rows(inputs, torch.arange(min(EXAMPLE_ROWS, count)))
    try:
        run = _run_labelled(copy_model(source), rows)
    except InvalidInputError:
        if not EXAMPLE_ROWS < count <= MOST_ROWS:
            raise
        rows = inputs  # their rows may belong together, as the nodes of a graph
        run = _run_labelled(copy_model(source), rows)
    _check_ignored(run, ignore)
    print_of = fingerprint(source)
    trial = Trial(run.model, lambda: copy_model(source), rows)
    structure, failed = _settle(run, trial, print_of, ignore)
    if failed and run.filled:
        wary = _run_labelled(copy_model(source), rows, follows=False)
        other, _ = _settle(wary, trial, print_of, ignore)
        return max(structure, other, key=_count_removable)
    return structure


def _settle(run: LabelledRun, trial: Trial, print_of: Fingerprint, ignore: Collection[str]) -> tuple[Structure, bool]:
    """The structure that passes the trial, and whether anything failed on the way."""
    structure, failed = assemble(run, print_of, ignore, ()), False
    while failing := trial.find_failing(structure):
        failed = True
        for group, reason in failing:
            for each in run.multiplications:
                if each.name in group.layers:
                    run.labels.keep(each.outputs, reason)
        structure = assemble(run, print_of, ignore, ())
    return structure, failed


def _count_removable(structure: Structure) -> int:
    return sum(int((layer.units != NO_UNIT).sum()) for layer in structure.layers)


def _check_ignored(run: LabelledRun, ignore: Collection[str]) -> None:
    layers = [each.name for each in run.multiplications if each.kernel]
    listed = dict.fromkeys([*layers, *(each.name for each in run.left_alone)])
    unknown = sorted(set(ignore) - set(listed))
    if unknown:
        raise InvalidSettingError(f"ignore: no layer is called {', '.join(unknown)}. Layers: {', '.join(listed)}.")


def _run_labelled(model: nn.Module, rows: Inputs, *, follows: bool = True) -> LabelledRun:
    """`model` is run, and run once more: one that remembers what it was given has no structure to rely on."""
    run = LabelledRun(model, follows=follows)
    given = map_inputs(rows, Tensor.clone)  # a forward may work on them in place
    arguments = (given,) if isinstance(given, Tensor) else () if isinstance(given, Mapping) else tuple(given)
    named = dict(given) if isinstance(given, Mapping) else {}
    with _seeded(), _failing_clearly(rows):
        outputs = list(find_tensors(run.run(arguments, named, count_rows(rows))))
    first = [tuple(values.shape) for values in outputs]
    if not first:
        name = type(model).__name__
        raise UnreadableModelError(f"{name}: its outputs hold no tensor. Return tensors, in any nesting.")
    try:
        second = [tuple(values.shape) for values in run_evenly(model, rows)]
    except FAILURES:
        second = []
    if first != second:
        raise UnreadableModelError(
            f"{type(model).__name__}: a second run on the same inputs gives outputs of other shapes, or none. Make "
            "the forward depend on nothing but its inputs."
        )
    return run


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def check_model(model: nn.Module) -> None:
    """Raise on what cannot be copied, sliced or run."""
    if not isinstance(model, nn.Module):
        raise UnreadableModelError(f"model: found {type(model).__name__}, expected a torch.nn.Module.")
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            where = name or "model"
            raise UnreadableModelError(
                f"{where}: a TorchScript module cannot be read. Give the nn.Module it was made from."
            )
        if ".quantized." in type(module).__module__:
            where = name or "model"
            raise UnreadableModelError(
                f"{where}: a quantised module cannot be read. Give the model as it was before."
            )
    buffers = dict(model.named_buffers())
    for name, values in [*model.named_parameters(), *buffers.items()]:
        if isinstance(values, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise UnreadableModelError(f"{name}: not initialised yet. Run the model once on an input first.")
        if values.is_meta:
            raise UnreadableModelError(f"{name}: on the meta device, without values. Load the weights first.")
        if values.is_complex() or values.is_quantized:
            raise UnreadableModelError(f"{name}: {values.dtype} weights are not read; floating-point ones are.")
        if values.is_floating_point() and not _is_finite(values, name in buffers):
            raise InvalidInputError(f"{name}: the model has NaN or infinite weights.")


def _is_finite(values: Tensor, buffer: bool) -> bool:
    """Numbers all of them. A buffer may be infinite, as the mask of an attention."""
    if buffer:
        return not bool(values.isnan().any())
    return bool(values.sum().isfinite()) or bool(values.isfinite().all())  # the first is many times faster


def copy_model(model: nn.Module) -> nn.Module:
    """A copy in evaluation mode."""
    try:
        return copy.deepcopy(model).eval()
    except (RuntimeError, TypeError) as error:
        raise UnreadableModelError(
            f"{type(model).__name__}: it cannot be copied ({first_line(error)}). Does it keep activations or other "
            "results of a run as attributes?"
        ) from error


def fingerprint(model: nn.Module) -> Fingerprint:
    architecture, weights = hashlib.sha256(), hashlib.sha256()
    for name, values in model.state_dict().items():
        if isinstance(values, Tensor):
            architecture.update(f"{name} {tuple(values.shape)};".encode())
            weights.update(f"{name} {values.dtype};".encode())
            weights.update(values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Fingerprint(architecture.hexdigest()[:16], weights.hexdigest()[:16])


def convert_to_double(model: nn.Module, rows: Inputs) -> tuple[nn.Module, Inputs]:
    """Model and inputs in double precision, if the model runs in it: a forward may make numbers of its own type."""

    def convert(values: Tensor) -> Tensor:
        return values.double() if values.is_floating_point() else values

    exact, example = copy.deepcopy(model).double(), map_inputs(rows, convert)
    try:
        with _seeded(), torch.no_grad():
            call_model(exact, map_inputs(example, Tensor.clone))
    except FAILURES:
        return model, rows
    return exact, example


@contextmanager
def _seeded() -> Iterator[None]:
    """Random numbers of torch, the same for every run, and as they were afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


@contextmanager
def _failing_clearly(rows: Inputs) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        shapes = ", ".join(str(tuple(values.shape)) for values in find_tensors(rows))
        raise InvalidInputError(
            f"inputs: the model does not run on {shapes}: {first_line(error)}{find_line(error)}. Give inputs as the "
            "model takes them: a tensor, a tuple or a dict of tensors."
        ) from error


def select_span(structure: Structure, start: str | None, stop: str | None) -> Structure:
    """What lies between two modules, both included, in the order of the calls. What is read from outside stays."""
    if start is None and stop is None:
        return structure
    order = [wiring.module for wiring in structure.wirings]
    first = 0 if start is None else _find_place(order, "start", start)[0]
    last = len(order) - 1 if stop is None else _find_place(order, "stop", stop)[-1]
    if first > last:
        raise InvalidSettingError(f"start, stop: {start} comes behind {stop}. Give them in the order of the calls.")
    inside = set(order[first : last + 1])
    read = [wiring.inputs for wiring in structure.wirings if wiring.module not in inside and wiring.kernel]
    outer = np.concatenate(read) if read else np.zeros(0, dtype=np.int64)
    reasons = {
        layer.name: "it feeds what lies outside the span"
        for layer in structure.scored
        if np.isin(layer.units[layer.units != NO_UNIT], outer).any()
    }
    return structure.within(inside).restrict(reasons)[0]


def _find_place(order: list[str], setting: str, name: str) -> list[int]:
    found = [place for place, module in enumerate(order) if module == name or module.startswith(f"{name}.")]
    if not found:
        raise InvalidSettingError(
            f"{setting}: no layer is called {name} or lies in a module of that name. Layers: {', '.join(order)}."
        )
    return found
