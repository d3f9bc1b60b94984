"""Latency: time layers at several widths, and a smaller model beside the original.

Times are for one input on one thread, in onnxruntime if the model can be exported, else in torch: the minimum of
several samples in processor seconds, since other load on the machine only adds to them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import process_time
from typing import Any, TypeVar

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor, nn

from critical_neurons.core.structure import Floats, Ints, Product, Structure, Wiring
from critical_neurons.errors import ExportError, InvalidSettingError, MissingExtraError
from critical_neurons.io.exporters import convert_to_onnx
from critical_neurons.io.onnx_runtime import Runner, convert_layer, open_onnx
from critical_neurons.parallel.threads import on_threads
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.metrics import evaluating, time_in_turns
from critical_neurons.removal.parametrised import make_plain
from critical_neurons.removal.rows import Inputs, call_model, match_model, take_rows

WIDTHS = ((1.0, 1.0), (1.0, 0.5), (0.5, 1.0), (0.5, 0.5), (0.25, 0.25))
"""Shares of the inputs and outputs with which a layer is timed."""

REPEATS = 15

ROUGH_TRIES, TRIES = 5, 4
"""Corrections of the share by the measured time of the smaller model: with rough scores, then with those of a
search."""

CLOSE = 0.95
"""Share of the target that is close enough for a rough try."""

MARGIN = 0.98

STRIDE = 0.7
"""Largest correction of a share at once, since a single measurement can be far off."""

NARROWED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Timed:
    """A module opened in a runtime, and the input it is timed with."""

    module: nn.Module
    row: Inputs
    run: Runner

    def __call__(self) -> object:
        return self.run(self.row)


def take_times(timed: Sequence[Timed]) -> list[float]:
    """Processor seconds of each, measured in turns."""
    with on_threads(1):
        return [min(samples) for samples in time_in_turns(timed, repeats=REPEATS, clock=process_time)]


class Stopwatch:
    """Times other models beside this one; `onnx`: in onnxruntime, if possible."""

    def __init__(self, model: nn.Module, inputs: Inputs, *, onnx: bool = True) -> None:
        self._model = make_plain(copy_whole(model))
        self._row = match_model(take_rows(inputs, torch.arange(1)), model)
        self.runtime = "torch"
        if onnx:
            with suppress(ExportError, MissingExtraError):
                self._before, self.runtime = self._export(model), "onnxruntime"
        if self.runtime == "torch":
            self._before = _open_in_torch(model, self._row)

    def compare(self, smaller: nn.Module) -> float:
        """The time of the smaller model, relative to that of the model."""
        after = self._export(smaller) if self.runtime == "onnxruntime" else _open_in_torch(smaller, self._row)
        first, second = take_times([self._before, after])
        return second / first

    def add_table(self, structure: Structure) -> Structure:
        """The structure with the nanoseconds of its layers, each a sum of products of the kept shares of its inputs
        and outputs. The rest of the model's time is constant."""
        seen = self._record(structure)
        table: dict[Any, list[float]] = {}
        products = []
        for wiring in structure.wirings:
            if wiring.module not in seen:
                continue
            module, example = self._model.get_submodule(wiring.module), seen[wiring.module]
            key = (str(module), tuple(example.shape))
            if key not in table:
                table[key] = self._time_layer(module, example)
            products += _share_out(wiring, table[key])
        (whole,) = take_times([self._before])
        explained = sum(product.amount for product in products)
        scale = min(1.0, 1e9 * whole / max(explained, 1))
        products = [replace(each, amount=round(scale * each.amount)) for each in products]
        rest = round(1e9 * whole) - sum(each.amount for each in products)
        return replace(structure, latency=(*products, Product("", max(rest, 0), ())))

    def _record(self, structure: Structure) -> dict[str, Tensor]:
        """The inputs of all layers that can be timed by themselves."""
        seen: dict[str, Tensor] = {}
        modules = {w.module: self._model.get_submodule(w.module) for w in structure.wirings if w.alone and w.kernel}
        hooks = [
            module.register_forward_pre_hook(lambda _, args, name=name: args and seen.update({name: args[0]}))
            for name, module in modules.items()
        ]
        try:
            with evaluating(self._model):
                call_model(self._model, self._row)
        finally:
            for hook in hooks:
                hook.remove()
        return {name: values.detach().clone() for name, values in seen.items() if isinstance(values, Tensor)}

    def _time_layer(self, module: nn.Module, example: Tensor) -> list[float]:
        """Seconds for each of `WIDTHS`; for a layer that cannot be narrowed, those of the whole layer."""
        if type(module) not in NARROWED or getattr(module, "groups", 1) > 1:
            return take_times([_open_in_torch(module, example)])
        timed = []
        for reads, gives in WIDTHS:
            narrow, row = _narrow(module, example, reads, gives)
            layer = convert_layer(narrow, row) if self.runtime == "onnxruntime" else None
            timed.append(_open_in_torch(narrow, row) if layer is None else Timed(narrow, row, open_onnx(layer)))
        return take_times(timed)

    def _export(self, model: nn.Module) -> Timed:
        return Timed(model, self._row, open_onnx(convert_to_onnx(model, self._row)))


def meet_latency(
    target: float,
    rough: Callable[[float], _Found],
    fine: Callable[[float], _Found],
    measure: Callable[[_Found], float],
) -> _Found:
    """The result for a share of the table whose measured time meets the target. `rough`, which is fast, is tried
    until it is close; then `fine`, with smaller and smaller shares."""
    share, taken = target, 1.0
    try:
        for _ in range(ROUGH_TRIES):
            taken = measure(rough(share))
            if CLOSE * target <= taken <= target:
                break
            share = min(share * max(target / taken, STRIDE), 1.0)
        for _ in range(TRIES):
            found = fine(share)
            taken = measure(found)
            if taken <= target:
                return found
            share *= MARGIN * max(target / taken, STRIDE)
    except InvalidSettingError as error:
        raise InvalidSettingError(
            f"latency: {target:.4g} of the measured time cannot be met by removing units. Give a larger share. "
            f"({error})"
        ) from error
    raise InvalidSettingError(
        f"latency: {target:.4g} of the measured time was not met; the last smaller model took {taken:.4g} of it. "
        "Give a larger share, or measure on a machine that does nothing else."
    )


def _open_in_torch(model: nn.Module, row: Inputs) -> Timed:
    copied = make_plain(copy_whole(model)).eval()

    def run(rows: Inputs) -> Any:
        with torch.inference_mode():
            return call_model(copied, rows)

    return Timed(model, row, run)


def _share_out(wiring: Wiring, seconds: Sequence[float]) -> list[Product]:
    """Nanoseconds proportional to the inputs, the outputs and both, by nonnegative least squares. The constant part,
    such as the overhead of a call, is left out."""
    axes: list[tuple[Ints, ...]] = [(wiring.inputs,), (wiring.outputs,), (wiring.inputs, wiring.outputs)]
    if len(seconds) == 1:
        amounts = [0.0, 0.0, seconds[0]]
        axes[2] = (wiring.outputs,) if wiring.depthwise else axes[2]
    else:
        shares: Floats = np.array([(1.0, reads, gives, reads * gives) for reads, gives in WIDTHS])
        amounts = nnls(shares, np.array(seconds))[0][1:].tolist()
    return [
        Product(wiring.module, round(1e9 * amount), each)
        for amount, each in zip(amounts, axes, strict=True)
        if amount
    ]


def _narrow(module: nn.Module, example: Tensor, reads: float, gives: float) -> tuple[nn.Module, Tensor]:
    """A layer with these shares of its inputs and outputs."""
    axis = -1 if isinstance(module, nn.Linear) else 1
    weight = module.weight
    assert isinstance(weight, Tensor)
    outputs, inputs = (max(1, round(share * size)) for share, size in zip((gives, reads), weight.shape, strict=False))
    narrow: Any = copy.deepcopy(module)
    narrow.weight = nn.Parameter(weight.detach()[:outputs, :inputs].clone(), requires_grad=False)
    if narrow.bias is not None:
        narrow.bias = nn.Parameter(narrow.bias.detach()[:outputs].clone(), requires_grad=False)
    return narrow, example.narrow(axis, 0, inputs).contiguous()
