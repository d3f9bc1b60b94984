"""Reading: nn.Module to Network, through torch.fx and one run on an example."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection
from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from critical_neurons.errors import (
    CriticalNeuronsError,
    InvalidInputError,
    InvalidSettingError,
    UnreadableModelError,
)
from critical_neurons.network import Affine, Fingerprint, Floats, Input, Network, Op, Relu
from critical_neurons.reading.channels import Channels, ChannelTracker
from critical_neurons.reading.maps import ReshapeMap
from critical_neurons.reading.registry import (
    SLICEABLE,
    Call,
    Ends,
    KeepsChannels,
    Mixes,
    Passes,
    Reader,
    Rectifies,
    find_module_reader,
    find_reader,
    overrides_readable,
    readable_layers,
)

READING_TOLERANCE = 1e-9
"""Largest relative difference between the logits of the model and of the network read from it."""

EXAMPLE_SIZE = 3
"""Data points in the tracing run: more than one, so that a forward that touches the batch axis shows."""


LOGIT_BATCH = 256
"""Data points run at once through the model."""


def read_network(model: nn.Module, example: Tensor, *, ignore: Collection[str] = ()) -> Network:
    """Describe `model` as affine maps and ReLUs in float64. The model itself is left as it is.

    `example` is a batch of inputs; only a few rows of it are used, for shapes and for a check of the result.
    Layers named in `ignore` get no scores.
    """
    source = unwrap(model)
    check_weights(source)
    if not isinstance(example, Tensor) or example.ndim < 2 or len(example) == 0:
        raise InvalidInputError(
            "example: give a batch of inputs, a tensor of shape (batch, ...) with at least one row."
        )
    rows = example[torch.arange(EXAMPLE_SIZE) % len(example)].detach().to("cpu", torch.float64)
    runnable = copy_for_reading(source)
    walk = _Walk(_trace(runnable))
    with torch.no_grad():
        try:
            walked = walk.run(rows.clone())
            expected = runnable(rows.clone())
        except CriticalNeuronsError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InvalidInputError(
                f"the model does not run on inputs of shape {tuple(example.shape)}: {_first_line(error)}"
            ) from error
    unknown = sorted(set(ignore) - {layer.name for layer in walk.tracker.layers})
    if unknown:
        known = ", ".join(layer.name for layer in walk.tracker.layers)
        raise InvalidSettingError(f"ignore: no layer is called {', '.join(unknown)}. Layers: {known}.")
    ops, layers, wirings = walk.tracker.finish(walk.outgoing, walk.ops, ignore)
    network = Network(ops, layers, wirings, fingerprint(source), tuple(walk.notes))
    read = torch.from_numpy(network.forward(rows.numpy()))
    _check_reading((read, walk.logits if walk.ended else expected), (walked, expected))
    return network


def run_to_logits(model: nn.Module, inputs: Floats) -> Floats:
    """The logits of the model itself, run by torch in float64, without a final softmax."""
    traced = _trace(copy_for_reading(unwrap(model)))
    parts = []
    with torch.no_grad():
        for at in range(0, len(inputs), LOGIT_BATCH):
            walk = _Walk(traced)
            result = walk.run(torch.tensor(inputs[at : at + LOGIT_BATCH]))
            parts.append((walk.logits if walk.ended else result).numpy())
    return np.concatenate(parts)


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def copy_for_reading(model: nn.Module) -> nn.Module:
    """A float64 copy on the CPU in evaluation mode."""
    return copy.deepcopy(model).to("cpu", torch.float64).eval()


def check_weights(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise UnreadableModelError(f"model: found {type(model).__name__}, expected a torch.nn.Module.")
    if isinstance(model, torch.jit.ScriptModule):
        raise UnreadableModelError("model: a TorchScript module cannot be read. Give the nn.Module it was made from.")
    for name, module in model.named_modules():
        if isinstance(module, SLICEABLE) and "weight" not in module._parameters and not is_parametrized(module):
            raise UnreadableModelError(
                f"{name}: its weight is computed by a hook (weight_norm, spectral_norm, torch.nn.utils.prune). "
                "Make it plain first, with remove_weight_norm, remove_spectral_norm or prune.remove."
            )
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if isinstance(values, nn.UninitializedParameter | nn.UninitializedBuffer):
            raise UnreadableModelError(f"{name}: not initialised yet. Run the model once on an input first.")
        if values.dtype in (torch.float16, torch.bfloat16):
            raise UnreadableModelError(
                f"{name}: half precision ({values.dtype}) is not read. Convert the model with model.float() first."
            )
        if values.is_complex() or values.is_quantized:
            raise UnreadableModelError(f"{name}: {values.dtype} weights are not read; float32 and float64 are.")
        if values.is_floating_point() and not torch.isfinite(values).all():
            raise InvalidInputError(f"{name}: the model has NaN or infinite weights.")


def fingerprint(model: nn.Module) -> Fingerprint:
    architecture, weights = hashlib.sha256(), hashlib.sha256()
    for name, values in model.state_dict().items():
        if isinstance(values, Tensor):
            architecture.update(f"{name} {tuple(values.shape)};".encode())
            data = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            weights.update(f"{name} {values.dtype};".encode() + data.numpy().tobytes())
    return Fingerprint(architecture.hexdigest()[:16], weights.hexdigest()[:16])


class _Tracer(fx.Tracer):
    """Stops at every layer that has a reader, and at subclasses of those that must not be read as their parent."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            find_module_reader(m) is not None
            or overrides_readable(m)
            or super().is_leaf_module(m, module_qualified_name)
        )


def _trace(model: nn.Module) -> fx.GraphModule:
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        raise UnreadableModelError(
            f"{type(model).__name__}: the forward cannot be traced by torch.fx ({_first_line(error)}). "
            "Control flow that depends on values or sizes must go, or the part that needs it must become a layer "
            "with a reader (@reads)."
        ) from error
    inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
    if len(inputs) != 1:
        names = ", ".join(node.name for node in inputs)
        raise UnreadableModelError(f"the forward has several inputs ({names}); networks with one are read.")
    traced = fx.GraphModule(model, graph)
    traced.graph.eliminate_dead_code()
    return traced


class _Walk(fx.Interpreter):
    """Runs the traced model on an example and notes what every call means."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # our messages are for users of models, not of torch.fx
        self.tracker = ChannelTracker()
        self.ops: list[Op] = []
        self.notes: list[str] = []
        self.logits: Tensor
        self.outgoing: Channels
        self.ended = ""
        self._value_of: dict[fx.Node, int] = {}
        self._channels: list[Channels] = []
        self._called: set[str] = set()
        self._parameters: dict[int, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return self._finish(n)
        result = super().run_node(n)
        if n.op == "placeholder":
            self._start(n, result)
        elif n.op != "get_attr" and any(source in self._value_of for source in n.all_input_nodes):
            if isinstance(result, Tensor):
                self._read(n, result)
            elif not isinstance(result, int | torch.Size | torch.dtype | torch.device):
                raise UnreadableModelError(f"{n.name}: it returns a {type(result).__name__}; only tensors are read.")
        return result

    def _start(self, n: fx.Node, result: Any) -> None:
        if self.ops:  # a further argument of forward that was left at its default
            return
        self._add(n, Input(tuple(result.shape[1:])), self.tracker.start(result.shape[1]))

    def _read(self, n: fx.Node, result: Tensor) -> None:
        if self.ended:
            raise UnreadableModelError(f"{n.name}: it follows {self.ended}, which is read only as the last step.")
        sources = [node for node in n.all_input_nodes if isinstance(self.env[node], Tensor)]
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        reader = self._reader(n, module)
        if len(sources) != 1 or sources[0] not in self._value_of:
            raise UnreadableModelError(f"{_describe(n, module)}: it joins several values; chains of layers are read.")
        source = self._value_of[sources[0]]
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        call = Call(
            name=str(n.target) if module is not None else n.name,
            function=module if module is not None else n.target,  # type: ignore[arg-type]
            module=module,
            args=args,
            kwargs=kwargs,
            input=self.env[sources[0]],
            output=result,
            literal_sizes=_literal_sizes(n),
        )
        self._note(n, call, reader, source)

    def _note(self, n: fx.Node, call: Call, reader: Reader, source: int) -> None:
        shape, incoming = call.output_shape, self._channels[source]
        reading = reader(call)
        match reading:
            case Mixes():
                self._call_once(call)
                kind = type(call.module).__name__
                obstacle = reading.obstacle or _obstacle(call)
                channels = self.tracker.mix(incoming, call.name, kind, shape[0], obstacle)
                self._add(n, Affine(call.name, source, shape, reading.map), channels)
            case KeepsChannels():
                if isinstance(reading.map, ReshapeMap):
                    channels = self.tracker.reshape(incoming, call.input_shape, shape, reading.obstacle)
                elif reading.shifts_zero:
                    self._call_once(call)
                    channels = self.tracker.scale(incoming, call.name)
                else:
                    channels = incoming
                if obstacle := _obstacle(call):
                    self.tracker.block(incoming, f"it feeds {call.name}, {obstacle}")
                self._add(n, Affine(call.name, source, shape, reading.map), channels)
            case Rectifies():
                channels, units = self.tracker.rectify(incoming, shape)
                self._add(n, Relu(call.name, source, shape, units), channels)
            case Passes():
                self._value_of[n] = source
            case Ends():
                self._value_of[n] = source
                self.logits, self.ended = call.input, call.name
                self.notes.append(reading.note)
            case _:
                assert_never(reading)

    def _finish(self, n: fx.Node) -> Any:
        result = n.args[0]
        if not isinstance(result, fx.Node):
            raise UnreadableModelError(
                f"the model returns a {type(result).__name__}; a single tensor of logits (batch, classes) is read."
            )
        value = self.env[result]
        if result not in self._value_of or value.ndim != 2 or value.shape[1] < 2:
            raise UnreadableModelError(
                f"the model returns a tensor of shape {tuple(value.shape)}; logits of shape (batch, classes) with at "
                "least two classes are read."
            )
        index = self._value_of[result]
        self.ops, self.outgoing = self.ops[: index + 1], self._channels[index]
        return value

    def _add(self, n: fx.Node, op: Op, channels: Channels) -> None:
        self._value_of[n] = len(self.ops)
        self.ops.append(op)
        self._channels.append(channels)

    def _call_once(self, call: Call) -> None:
        if call.name in self._called:
            raise call.refuse("this module is called more than once", "Layers that share weights are not read.")
        self._called.add(call.name)
        for parameter in call.module.parameters() if call.module is not None else ():
            other = self._parameters.setdefault(id(parameter), call.name)
            if other != call.name:
                raise call.refuse(f"it shares weights with {other}", "Layers that share weights are not read.")

    def _reader(self, n: fx.Node, module: nn.Module | None) -> Reader:
        if module is not None and is_parametrized(module):
            raise UnreadableModelError(
                f"{n.target}: its weights are parametrised. Make them plain with "
                "torch.nn.utils.parametrize.remove_parametrizations first."
            )
        reader = find_module_reader(module) if module is not None else find_reader(n.target)
        if reader is None:
            raise UnreadableModelError(_unreadable(n, module))
        return reader


def _describe(n: fx.Node, module: nn.Module | None) -> str:
    if module is not None:
        return f"{n.target}: nn.{type(module).__name__}"
    return f"{n.name}: {getattr(n.target, '__name__', n.target)}"


def _unreadable(n: fx.Node, module: nn.Module | None) -> str:
    found = type(module).__name__ if module is not None else getattr(n.target, "__name__", str(n.target))
    place = n.target if module is not None else n.name
    why = (
        ", a subclass of a readable layer with a forward of its own" if module and overrides_readable(module) else ""
    )
    return (
        f"{place}: cannot read {found}{why}. Readable layers: {', '.join(readable_layers())}, and their functional "
        f"forms. Register a reader with @critical_neurons.reads({found})."
    )


def _obstacle(call: Call) -> str:
    """Why the channels around a call must stay, if so: its parameters cannot be sliced."""
    if call.module is None or isinstance(call.module, SLICEABLE) or not call.module.state_dict():
        return ""
    return f"a {type(call.module).__name__}, whose parameters cannot be sliced"


def _literal_sizes(n: fx.Node) -> tuple[int, ...]:
    """Sizes other than the batch written as numbers in a view or reshape."""
    if n.target not in ("view", "reshape", torch.reshape):
        return ()
    sizes = n.args[1] if len(n.args) == 2 and isinstance(n.args[1], tuple | list) else n.args[1:]
    return tuple(size for size in tuple(sizes)[1:] if isinstance(size, int) and size > 1)


def _check_reading(*pairs: tuple[Tensor, Tensor]) -> None:
    """What was found and what was expected must agree."""
    for found, expected in pairs:
        difference = float((found - expected).abs().max())
        if not difference <= READING_TOLERANCE * max(1.0, float(expected.abs().max())):
            raise UnreadableModelError(
                f"the network read from the model gives other logits than the model (difference {difference:.2e}). "
                "Hooks, in-place changes of shared values or a forward that reads more than its input are not read."
            )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
