"""Find a structure: one labelled run of a copy of the model, tested by a trial removal."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import NO_UNIT, Fingerprint, Group, Structure
from critical_neurons.errors import (
    InvalidInputError,
    InvalidSettingError,
    PruningError,
    UnreadableModelError,
    first_line,
)
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.parametrised import open_attention
from critical_neurons.removal.rows import (
    Inputs,
    as_whole,
    call_model,
    count_rows,
    find_tensors,
    map_inputs,
    match_model,
    split_arguments,
    take_rows,
)
from critical_neurons.removal.same_outputs import FAILURES, require_same, run_evenly
from critical_neurons.removal.seeding import seeded
from critical_neurons.structure.assembly import assemble
from critical_neurons.structure.run import NOTHING, LabelledRun
from critical_neurons.structure.source import check_model, copy_model, fingerprint, unwrap
from critical_neurons.structure.state import ModelState
from critical_neurons.structure.trial import Trial
from critical_neurons.structure.user_code import find_failing_line

EXAMPLE_ROWS = 2
"""More than one, to detect a forward pass that changes the batch axis."""

MOST_ROWS = 4096
"""If a model does not run on a few rows, it is run on all, up to this many."""


@torch.inference_mode(False)  # there a labelled run sees other calls
@torch.no_grad()
def find_structure(model: nn.Module, inputs: Inputs, *, ignore: Collection[str] = ()) -> Structure:
    """What can be removed from the model, found by running a copy on a few rows of the inputs.

    Layers in `ignore` lose nothing. The result of the labelled run is tested: some units of every group are removed,
    and the smaller model is compared with the masked one. Groups that fail, for instance because a size is written
    into the forward pass, must stay, with the reason.
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
        rows = as_whole(inputs)  # rows may be inseparable, as the nodes of a graph
        run = _run_labelled(copy_model(source), rows)
    _check_ignored(run, ignore)
    print_of = fingerprint(source)
    trial = Trial(run.model, rows, draws=run.draws)
    split: dict[str, str] = {}
    while True:
        structure, failed, heads = _settle(run, trial, print_of, ignore)
        if not heads:
            break
        split |= heads  # where whole heads cannot be removed
        run = _run_labelled(copy_model(source), rows, split=split)
    if failed and run.filled:
        wary = _run_labelled(copy_model(source), rows, follows=False, split=split)
        other, _, _ = _settle(wary, trial, print_of, ignore)
        return max(structure, other, key=_count_removable)
    return structure


def join_rows(model: nn.Module, inputs: Inputs) -> Inputs:
    """The inputs, of the model's type and device; as one row if the model does not run on a few of them, or if its
    outputs do not begin with as many rows. `model` is a copy."""
    count = count_rows(inputs)
    few = take_rows(inputs, torch.arange(min(EXAMPLE_ROWS, count)))
    try:
        split = all(values.shape[:1] == (count_rows(few),) for values in run_evenly(model, few))
    except FAILURES:
        split = False
    if not split:
        rows = as_whole(inputs) if EXAMPLE_ROWS < count <= MOST_ROWS else few
        with _failing_clearly(rows):
            run_evenly(model, rows)
        return rows
    return inputs


def _settle(
    run: LabelledRun, trial: Trial, print_of: Fingerprint, ignore: Collection[str]
) -> tuple[Structure, bool, dict[str, str]]:
    """The structure that passes the trial, whether anything failed before, and the modules whose heads failed, with
    the reason."""
    structure, failed = assemble(run, print_of, ignore, ()), False
    while failing := trial.find_failing(structure):
        failed = True
        if heads := {name: reason for group, reason in failing for name in _find_heads(run, group)}:
            return structure, failed, heads
        for group, reason in failing:
            for each in run.multiplications:
                if each.name in group.layers:
                    run.labels.keep(each.outputs, reason)
        structure = assemble(run, print_of, ignore, ())
    return structure, failed, {}


def _find_heads(run: LabelledRun, group: Group) -> list[str]:
    """The modules with heads in the group, and all of the same class, which have the same code."""
    if not run.heads:
        return []
    classes = run.labels.resolve()
    own = [classes.find(each.outputs) for each in run.multiplications if each.name in group.layers]
    units = np.concatenate([np.full(1, NO_UNIT), *own])[1:]
    blamed = {
        type(run.model.get_submodule(name))
        for name, several in run.heads.items()
        if any(np.isin(found[found != NO_UNIT], units).any() for found in map(classes.find, several))
    }
    return [name for name in run.heads if type(run.model.get_submodule(name)) in blamed]


def _count_removable(structure: Structure) -> int:
    return sum(int((layer.units != NO_UNIT).sum()) for layer in structure.layers)


def _check_ignored(run: LabelledRun, ignore: Collection[str]) -> None:
    layers = [each.name for each in run.multiplications if each.kernel]
    listed = dict.fromkeys([*layers, *(each.name for each in run.left_alone)])
    unknown = sorted(set(ignore) - set(listed))
    if unknown:
        raise InvalidSettingError(f"ignore: no layer is called {', '.join(unknown)}. Layers: {', '.join(listed)}.")


def _run_labelled(
    model: nn.Module, rows: Inputs, *, follows: bool = True, split: Mapping[str, str] = NOTHING
) -> LabelledRun:
    """Run the model, and once more if that changed it: a model that remembers earlier inputs has no reliable
    structure."""
    run = LabelledRun(open_attention(model), follows=follows, split=split)
    before = ModelState(model)
    given = map_inputs(rows, Tensor.clone)  # a forward pass may change them in place
    with seeded(0, model), _failing_clearly(rows):
        outputs = list(find_tensors(run.run(*split_arguments(given), count_rows(rows))))
    if not outputs:
        raise UnreadableModelError(
            f"{type(model).__name__}: its outputs hold no tensor. Return tensors, in any nesting."
        )
    if before.has_changed(model):
        _check_repeatable(model, rows, outputs, before)
    return run


def _check_repeatable(model: nn.Module, rows: Inputs, outputs: list[Tensor], before: ModelState) -> None:
    """Raise unless a second run gives the same shapes, and the same outputs if buffers have changed."""
    name = type(model).__name__
    try:
        second = run_evenly(model, rows)
    except FAILURES:
        second = []
    if [values.shape for values in outputs] != [values.shape for values in second]:
        raise UnreadableModelError(
            f"{name}: a second run on the same inputs gives outputs of other shapes, or none. Make the forward "
            "depend on nothing but its inputs."
        )
    changed = before.list_changed(model)
    if changed and not _agree(outputs, second) and not _settles(model, rows):
        raise UnreadableModelError(
            f"{name}: it changes itself while it runs ({', '.join(changed)}), and its outputs with it, so that no "
            "two runs give the same. Make the forward write to its buffers in training mode alone."
        )


def _settles(model: nn.Module, rows: Inputs) -> bool:
    """Whether two further runs give the same."""
    try:
        return _agree(run_evenly(model, rows), run_evenly(model, rows))
    except FAILURES:
        return False


def _agree(first: list[Tensor], second: list[Tensor]) -> bool:
    try:
        require_same(first, second)
    except PruningError:
        return False
    return True


def convert_to_double(model: nn.Module, rows: Inputs) -> tuple[nn.Module, Inputs]:
    """Model and inputs in double precision, if the model runs in it; a forward pass may create other types."""

    def convert(values: Tensor) -> Tensor:
        return values.double() if values.is_floating_point() else values

    exact, example = copy_whole(model).double(), map_inputs(rows, convert)
    try:
        with seeded(0, exact), torch.no_grad():
            call_model(exact, map_inputs(example, Tensor.clone))
    except FAILURES:
        return model, rows
    return exact, example


@contextmanager
def _failing_clearly(rows: Inputs) -> Iterator[None]:
    try:
        yield
    except FAILURES as error:
        shapes = ", ".join(str(tuple(values.shape)) for values in find_tensors(rows))
        raise InvalidInputError(
            f"inputs: the model does not run on {shapes}: {first_line(error)}{find_failing_line(error)}. Give inputs "
            "as the model takes them: a tensor, a tuple or a dict of tensors."
        ) from error
