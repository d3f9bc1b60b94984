"""Metrics: size, run time and accuracy of a model, which is not changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from critical_neurons.errors import CriticalNeuronsError, InvalidInputError, first_line
from critical_neurons.removal.dispatch import DispatchMode
from critical_neurons.removal.rows import (
    Inputs,
    call_model,
    find_tensors,
    match_model,
    split_rows,
    take_rows,
)

SAMPLE_SECONDS = 1e-3
"""Shorter calls are repeated within one sample, so that the clock and the loop do not matter."""


LEAST_SAMPLES = 5
"""Samples of every call, however long it takes."""


TIME_LIMIT = 10.0
"""Seconds after which sampling stops, once there are `LEAST_SAMPLES`."""


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def count_bytes(model: nn.Module) -> int:
    """The size of the model's parameters and buffers as a safetensors file."""
    return len(save({name: values.contiguous().clone() for name, values in model.state_dict().items()}))


def count_macs(model: nn.Module, example: Inputs) -> int:
    """Multiply-adds of convolutions and matrix products for one input, by torch's own formulas."""
    with evaluating(model), _unfused(), _FlopCounter() as counter:
        run_model(model, _first(example))
    return int(counter.flops) // 2


class _FlopCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """torch's `FlopCounterMode` without its import of torch's compiler."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        count, kwargs = flop_registry.get(func.overloadpacket), kwargs or {}
        if count is None:
            with self:  # composite operators are counted by what they are made of
                given = func.decompose(*args, **kwargs)
            return func(*args, **kwargs) if given is NotImplemented else given
        given = func(*args, **kwargs)
        self.flops += int(count(*args, **kwargs, out_val=given))
        return given


def measure_activations(model: nn.Module, example: Inputs) -> int:
    """Peak memory of activations in bytes, for one input in eager mode.

    Counts the input and every tensor computed, as long as something refers to it, and each storage once. Weights and
    the scratch memory of kernels do not count. Transformer layers run step by step: in the fused call that torch has
    for whole ones everything would be scratch memory, and a smaller one cannot use that call.
    """
    row = match_model(_first(example), model)
    weights = [*model.parameters(), *model.buffers()]
    with evaluating(model), _step_by_step(), _MemoryWatch(find_tensors(row), known=weights) as watch:
        run_model(model, row)
    return int(watch.peak)


def measure_accuracy(model: nn.Module, inputs: Inputs, labels: Tensor, *, batch_size: int = 512) -> float:
    """Share of data points whose highest output is their label, in evaluation mode."""
    return share_of_equals(predict(model, inputs, batch_size=batch_size), labels)


def predict(model: nn.Module, inputs: Inputs, *, batch_size: int = 512) -> Tensor:
    """The class of the highest output of every data point, on the CPU."""
    with evaluating(model):
        return predict_by(lambda rows: run_model(model, rows), inputs, batch_size=batch_size)


def predict_by(run: Callable[[Inputs], Any], inputs: Inputs, *, batch_size: int = 512) -> Tensor:
    """`predict` for any function from inputs to outputs."""
    return torch.cat([_find_classes(run(rows)).argmax(dim=1).cpu() for rows in split_rows(inputs, batch_size)])


def count_classes(model: nn.Module, example: Inputs) -> int:
    with evaluating(model):
        return _find_classes(run_model(model, _first(example))).shape[1]


def share_of_equals(found: Tensor, expected: Tensor) -> float:
    return int((found == expected.to(found.device)).sum()) / len(found)


def time_in_turns(
    calls: Sequence[Callable[[], object]], *, repeats: int, clock: Callable[[], float] = perf_counter
) -> list[list[float]]:
    """Seconds per call: up to `repeats` samples of every call after a warm-up.

    The calls take turns, in alternating order, so that a machine that slows down affects all of them alike.
    """
    loops = [_choose_loop(call) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    started = perf_counter()
    for turn in range(repeats):
        if turn >= LEAST_SAMPLES and perf_counter() - started > TIME_LIMIT:
            break
        for at in range(len(calls))[:: 1 if turn % 2 == 0 else -1]:
            before = clock()
            for _ in range(loops[at]):
                calls[at]()
            samples[at].append((clock() - before) / loops[at])
    return samples


def run_model(model: nn.Module, inputs: Inputs) -> Any:
    """The output for inputs converted to the model's type and device; a failure becomes `InvalidInputError`."""
    rows = match_model(inputs, model)
    try:
        return call_model(model, rows)
    except CriticalNeuronsError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AssertionError) as error:
        shapes = ", ".join(str(tuple(values.shape)) for values in find_tensors(rows))
        raise InvalidInputError(f"inputs: the model does not run on shape {shapes}: {first_line(error)}") from error


def _first(inputs: Inputs) -> Inputs:
    """A copy of the first row."""
    return take_rows(inputs, torch.arange(1))


def _find_classes(outputs: Any) -> Tensor:
    """The only output, of shape (batch, classes), or an error."""
    tensors = list(find_tensors(outputs))
    if len(tensors) != 1 or tensors[0].ndim != 2:
        shapes = ", ".join(str(tuple(values.shape)) for values in tensors)
        found = f"shape {shapes}" if tensors else type(outputs).__name__
        raise InvalidInputError(f"model: it returns {found}. Accepted: a tensor of outputs (batch, classes).")
    return tensors[0]


def _choose_loop(call: Callable[[], object]) -> int:
    call()
    before = perf_counter()
    call()
    return max(1, round(SAMPLE_SECONDS / max(perf_counter() - before, 1e-9)))


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; afterwards every module is back in its mode."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards buffers are restored as well, since a forward pass may count its calls in them."""
    owners = [module._buffers for module in model.modules()]
    buffers = [(own, name, values) for own in owners for name, values in own.items()]
    saved = [None if values is None else values.detach().clone() for _, _, values in buffers]
    try:
        with in_evaluation_mode(model):
            yield
    finally:
        for (own, name, values), before in zip(buffers, saved, strict=True):
            own[name] = values
            if values is not None and before is not None and not torch.equal(values, before):
                with torch.no_grad():
                    values.copy_(before)


@contextmanager
def _unfused() -> Iterator[None]:
    """Without fused kernels for attention and recurrent layers, which torch's counter does not know."""
    library: Any = torch.backends.mkldnn
    enabled = library.enabled
    library.enabled = False  # its context manager `flags` warns about unrelated settings
    try:
        with _step_by_step(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        library.enabled = enabled


@contextmanager
def _step_by_step() -> Iterator[None]:
    """Transformer layers without the fused call for all of their steps."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _MemoryWatch(DispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the memory of live tensors and its peak."""

    def __init__(self, inputs: Iterable[Tensor], known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive = {values.untyped_storage().data_ptr() for values in known}
        self._bytes, self.peak = 0, 0
        for values in inputs:
            self._enter(values)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for values in tree_leaves(outputs):
            if isinstance(values, Tensor):
                self._enter(values)
        return outputs

    def _enter(self, values: Tensor) -> None:
        storage = values.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address in self._alive or size == 0:
            return
        self._alive.add(address)
        self._bytes += size
        self.peak = max(self.peak, self._bytes)
        weakref.finalize(storage, self._leave, address, size)

    def _leave(self, address: int, size: int) -> None:
        self._alive.discard(address)
        self._bytes -= size
