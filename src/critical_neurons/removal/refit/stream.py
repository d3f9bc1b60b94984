"""Stream: run original and smaller model side by side on calibration inputs, and refit module by module.

Modules are refitted in the order of their calls, so that each one's inputs come from modules already refitted. Every
batch takes one forward pass of each model. All passes pause at a module, it is refitted, and they go on. Batches that
do not fit into memory beside large feature maps join at later modules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.metrics import evaluating, in_evaluation_mode
from critical_neurons.removal.refit.batches import HELD_OUT, LEAST_INPUTS, plan_batches, shuffle
from critical_neurons.removal.refit.dry_run import DryRun, run_dry
from critical_neurons.removal.refit.im2col import find_channel_axis
from critical_neurons.removal.refit.least_squares import Refit, Refitting, RowLimit, begin_refit, is_refittable
from critical_neurons.removal.refit.passes import ForwardPass, close_all, pause_at
from critical_neurons.removal.rows import Inputs, call_model, count_rows, is_whole, take_rows

OnOutputs: TypeAlias = Callable[[Tensor, Any], None]
"""Called with some rows, and the outputs of the refitted model for them."""


@dataclass(frozen=True)
class Stop:
    """A module to refit, and the original's output channels that it still has. `reads`: the input channels that may
    have weights, of a module in full size."""

    module: str
    kept: Tensor
    reads: Tensor | None = None


def refit_modules(
    original: nn.Module,
    smaller: nn.Module,
    stops: Sequence[Stop],
    inputs: Inputs,
    method: Refit,
    progress: Callable[[int, int], None] = lambda done, total: None,
    on_covariances: Callable[[str, Tensor, Tensor], None] | None = None,
    finish: OnOutputs | None = None,
    limit: RowLimit | None = None,
) -> dict[str, int]:
    """Refit the modules of `smaller` at the stops, where their kind allows it.

    A module that only some batches reach is refitted on those. A module called several times is refitted at its first
    call only: refitting it again would change what was computed before. `progress` gets the number of modules done
    and the total. `on_covariances` is called with the name of every refitted module and the arguments of
    `OnCovariances`. With `finish` the passes of the smaller model run to their end, and it gets their outputs.
    `limit`: of the rows that every module is refitted on, by default `least_squares.ROW_LIMIT`.

    Returns the number of inputs that each module was refitted on: fewer than all where memory does not suffice, and
    no entry for modules that no input reaches in both models.
    """
    check_inputs(inputs)
    names = _find_refittable(smaller, stops)
    chosen = {stop.module: stop for stop in stops if stop.module in names}
    with ExitStack() as stack:
        for setting in (torch.inference_mode(False), evaluating(original), in_evaluation_mode(smaller)):
            stack.enter_context(setting)
        return (
            _RefitStream(original, smaller, chosen, inputs, method, on_covariances, finish, limit).run(progress)
            if chosen
            else {}
        )


def check_inputs(inputs: Inputs, *, held_out: int = 0) -> None:
    """`held_out`: how many will be held out before refitting."""
    count, least = count_rows(inputs), LEAST_INPUTS + held_out
    if count < least and not is_whole(inputs):
        raise InvalidInputError(f"calibration: found {count} inputs. Give {least} or more.")


def _find_refittable(smaller: nn.Module, stops: Sequence[Stop]) -> list[str]:
    """Every module once, under its first name. Modules that share a parameter are not refitted: what suits one may
    harm the other."""
    owners = Counter(id(value) for module in smaller.modules() for value in module.parameters(recurse=False))
    found: dict[nn.Module, str] = {}
    for stop in stops:
        module = smaller.get_submodule(stop.module)
        alone = all(owners[id(value)] == 1 for value in module.parameters(recurse=False))
        if alone and is_refittable(module):
            found.setdefault(module, stop.module)
    return list(found.values())


@dataclass(frozen=True)
class _Batch:
    """The passes of both models for the same inputs."""

    size: int
    original: ForwardPass
    smaller: ForwardPass


class _RefitStream:
    def __init__(
        self,
        original: nn.Module,
        smaller: nn.Module,
        stops: dict[str, Stop],
        inputs: Inputs,
        method: Refit,
        on_covariances: Callable[[str, Tensor, Tensor], None] | None,
        finish: OnOutputs | None,
        limit: RowLimit | None,
    ) -> None:
        self._original, self._smaller, self._stops = original, smaller, stops
        self._inputs, self._method, self._on_covariances, self._finish = inputs, method, on_covariances, finish
        self._limit, self._device = limit, next((each.device for each in smaller.parameters()), None)
        self._modules = {name: smaller.get_submodule(name) for name in stops}
        self._batches: list[_Batch] = []
        self._served: set[str] = set()
        self._used: dict[str, int] = {}

    def run(self, progress: Callable[[int, int], None]) -> dict[str, int]:
        watched = {name: self._original.get_submodule(name) for name in self._stops}
        shuffled = shuffle(count_rows(self._inputs))  # data may be sorted by class
        few = shuffled[:LEAST_INPUTS]
        found = run_dry(self._original, watched, self._take(few))
        joining = plan_batches(found, len(few), shuffled)
        with pause_at(watched, behind=True), pause_at(self._modules, behind=False):
            try:
                self._serve(found, joining, progress)
            finally:
                close_all(forward for batch in self._batches for forward in (batch.original, batch.smaller))
        return self._used

    def _serve(
        self, found: DryRun, joining: dict[str, tuple[Tensor, ...]], progress: Callable[[int, int], None]
    ) -> None:
        """Refit module by module in the order of the dry run. A module that the dry run did not reach comes next."""
        order = list(found.modules)
        for place, name in enumerate(order):  # the list may grow behind this place
            progress(place, len(self._stops))
            for rows in joining.get(name, ()):
                self._batches.append(self._begin_batch(rows))
            refit, sizes = self._begin_refit(name, absorbed=name in found.absorbed), list[int]()
            for batch in self._batches:
                self._advance(batch)
                if self._add(refit, name, batch, held_out=len(sizes) % HELD_OUT == HELD_OUT - 1):
                    sizes.append(batch.size)
                for pause in (batch.original.at, batch.smaller.at):
                    if pause and pause.module not in order:
                        order.insert(place + 1, pause.module)
            if sizes:
                with self._exactly():
                    refit.finish()
                self._used[name] = sum(sizes)
            self._served.add(name)
        if self._finish is not None:
            for batch in self._batches:
                batch.smaller.run_on()
        progress(len(self._stops), len(self._stops))

    def _begin_batch(self, rows: Tensor) -> _Batch:
        calls = (partial(self._call, self._original, rows), partial(self._call, self._smaller, rows, self._finish))
        return _Batch(len(rows), *(ForwardPass(call, self._served) for call in calls))

    def _call(self, model: nn.Module, rows: Tensor, finish: OnOutputs | None = None) -> None:
        given = call_model(model, self._take(rows))
        if finish is not None:
            finish(rows, given)

    def _take(self, rows: Tensor) -> Inputs:
        return take_rows(self._inputs, rows, self._device)

    def _begin_refit(self, name: str, *, absorbed: bool) -> Refitting:
        module, stop = self._modules[name], self._stops[name]
        return begin_refit(
            module,
            stop.kept,
            self._method,
            sum(batch.size for batch in self._batches),
            absorbed=absorbed and module.bias is None,
            reads=stop.reads,
            on_covariances=None if self._on_covariances is None else partial(self._on_covariances, name),
            limit=self._limit,
        )

    def _advance(self, batch: _Batch) -> None:
        for what, forward in (("original", batch.original), ("smaller", batch.smaller)):
            try:
                forward.advance()
            except Exception as error:
                error.add_note(
                    f"compensating: the {what} model raised this on {batch.size} of the calibration inputs."
                )
                raise

    def _add(self, refit: Refitting, name: str, batch: _Batch, *, held_out: bool) -> bool:
        """Add a batch; False if not both models reach the module, or their inputs cannot be compared."""
        before, after = batch.original.at, batch.smaller.at
        if before is None or after is None or not before.module == after.module == name:
            return False
        given = before.given
        if given is None or not given.numel() or not _are_alike(self._modules[name], before.read, after.read):
            return False
        with self._exactly():
            refit.add(before.read, given, after.read, input_count=batch.size, held_out=held_out)
        return True

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        """Without autocast, which only the models use."""
        with ExitStack() as stack:
            for kind in {"cpu", self._device.type if self._device else "cpu"}:
                stack.enter_context(torch.autocast(kind, enabled=False))
            yield


def _are_alike(module: nn.Module, read: Tensor, found: Tensor) -> bool:
    """Whether shapes agree apart from channels. A smaller model may take another path."""
    shapes = []
    for values in (read, found):
        axis = find_channel_axis(module, values)
        shapes.append((*values.shape[:axis], *values.shape[axis + 1 :]))
    return shapes[0] == shapes[1]
