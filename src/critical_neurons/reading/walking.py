"""Walking: a traced model, run on an example, to ops and channels; every call by its reader."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from critical_neurons.errors import UnreadableModelError
from critical_neurons.network import Affine, Concat, Input, MaxPool, Op, Relu, Sum
from critical_neurons.reading.channels import Channels, ChannelTracker, Cost
from critical_neurons.reading.maps import ReshapeMap, ScaleMap
from critical_neurons.reading.registry import (
    SLICEABLE,
    Adds,
    Call,
    Concatenates,
    Ends,
    Filters,
    KeepsChannels,
    Mixes,
    Passes,
    PoolsMaximum,
    Reader,
    Reading,
    Rectifies,
    Reshapes,
    Scales,
    find_module_reader,
    find_reader,
    overrides_readable,
    readable_layers,
)


class Walk(fx.Interpreter):
    """Runs the traced model and notes what every call means."""

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
        self._value_of[n] = self._add(Input(tuple(result.shape[1:])), self.tracker.start(result.shape[1]))

    def _read(self, n: fx.Node, result: Tensor) -> None:
        if self.ended:
            raise UnreadableModelError(f"{n.name}: it follows {self.ended}, which is read only as the last step.")
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        reader = self._reader(n, module)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        nodes = [node for node in _tensor_arguments(n) if isinstance(self.env[node], Tensor)]
        call = Call(
            name=str(n.target) if module is not None else n.name,
            function=module if module is not None else n.target,  # type: ignore[arg-type]
            module=module,
            args=args,
            kwargs=kwargs,
            inputs=tuple(self.env[node] for node in nodes),
            output=result,
            literal_sizes=_literal_sizes(n),
        )
        if not all(node in self._value_of for node in nodes):
            raise call.refuse("it reads a tensor that does not come from the input", "Make it part of a layer.")
        sources = tuple(self._value_of[node] for node in nodes)
        reading = reader(call)
        if len(sources) != 1 and not isinstance(reading, Adds | Concatenates):
            raise call.refuse("it joins several values", "Values are joined by addition and torch.cat only.")
        self._value_of[n] = self._note(call, reading, sources)

    def _note(self, call: Call, reading: Reading, sources: tuple[int, ...]) -> int:
        """Add the ops of a call; the index of its value."""
        name, shape, source = call.name, call.output_shape, sources[0]
        incoming, tracker = self._channels[source], self.tracker
        kind = type(call.module).__name__
        match reading:
            case Mixes():
                self._call_once(call)
                obstacle = reading.obstacle or _obstacle(call)
                cost = _cost(call, reading.groups)
                channels = tracker.mix(incoming, name, kind, cost, padded=reading.padded, obstacle=obstacle)
                return self._add(Affine(name, source, shape, reading.map), channels)
            case Filters():
                self._call_once(call)
                cost = _cost(call, call.input_shape[0])
                channels = tracker.filter(incoming, name, kind, cost, padded=reading.padded)
                return self._add(Affine(name, source, shape, reading.map, keeps_channels=True), channels)
            case Scales():
                self._call_once(call)
                parameters = 0 if call.module is None else len(list(call.module.parameters()))
                channels = tracker.scale(incoming, name, reading.scale, reading.offset, parameters=parameters)
                op = Affine(name, source, shape, ScaleMap(reading.scale, reading.offset), keeps_channels=True)
                return self._add(op, channels)
            case KeepsChannels():
                if obstacle := _obstacle(call):
                    tracker.block(incoming, f"it feeds {name}, {obstacle}")
                channels = tracker.average(incoming, name, keeps_constants=reading.keeps_constants)
                return self._add(Affine(name, source, shape, reading.map, keeps_channels=True), channels)
            case Reshapes():
                channels = tracker.reshape(incoming, call.input_shape, shape, reading.obstacle)
                reshape = ReshapeMap(call.input_shape, shape)
                return self._add(Affine(name, source, shape, reshape, keeps_channels=True), channels)
            case Rectifies():
                return self._rectify(name, source, reading.ceiling)
            case PoolsMaximum():
                return self._add(MaxPool(name, source, shape, reading.windows), incoming)
            case Adds():
                channels = tracker.add([self._channels[index] for index in sources], name)
                return self._add(Sum(name, sources, shape), channels)
            case Concatenates():
                channels = tracker.concatenate([self._channels[index] for index in sources])
                return self._add(Concat(name, sources, shape), channels)
            case Passes():
                return source
            case Ends():
                self.logits, self.ended = call.input, name
                self.notes.append(reading.note)
                return source
            case _:
                assert_never(reading)

    def _rectify(self, name: str, source: int, ceiling: float | None) -> int:
        """max(0, x), or min(max(0, x), c) = max(0, x) - max(0, x - c), both gated by the same units.

        A ReLU behind a max pool is put before it, which is the same: both keep the order of numbers.
        """
        op = self.ops[source]
        if isinstance(op, MaxPool) and not self._channels[source].nonnegative:
            inside = self._rectify(name, op.source, ceiling)
            return self._add(replace(op, source=inside), self._channels[inside])
        shape, incoming = op.shape, self._channels[source]
        channels, units = self.tracker.rectify(incoming, shape)
        rectified = self._add(Relu(name, source, shape, units), channels)
        if ceiling is None:
            return rectified
        ones = np.ones(shape[0])
        lowered = Affine(name, source, shape, ScaleMap(ones, -ceiling * ones), keeps_channels=True)
        above = self._add(Relu(name, self._add(lowered, incoming), shape, units), channels)
        negated = Affine(name, above, shape, ScaleMap(-ones, 0 * ones), keeps_channels=True)
        minus = self._add(negated, channels)
        return self._add(Sum(name, (rectified, minus), shape), channels)

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
        self.outgoing = self._channels[index]
        self._keep_reachable(index)
        return value

    def _keep_reachable(self, last: int) -> None:
        """Drop the ops that the output does not depend on, and number the others anew."""
        wanted = {0, last}
        for index in range(last, -1, -1):
            if index in wanted:
                wanted.update(self.ops[index].sources)
        order = sorted(wanted)
        number = {old: new for new, old in enumerate(order)}
        for index in order:
            op = self.ops[index]
            if isinstance(op, MaxPool) and not self._channels[op.source].nonnegative:
                raise UnreadableModelError(
                    f"{op.name}: a max pool on values that may be negative. It is read behind a ReLU, or "
                    "right before one."
                )
        self.ops = [_renumber(self.ops[index], number) for index in order]

    def _add(self, op: Op, channels: Channels) -> int:
        self.ops.append(op)
        self._channels.append(channels)
        return len(self.ops) - 1

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


def _cost(call: Call, groups: int) -> Cost:
    """Weights per pair of channels, and how often each is used."""
    weight = getattr(call.module, "weight", None)
    return Cost(
        size=call.output_shape[0],
        kernel=math.prod(weight.shape[2:]) if isinstance(weight, Tensor) else 0,
        positions=math.prod(call.output_shape[1:]),
        groups=groups,
        extras=int(getattr(call.module, "bias", None) is not None),
    )


def _renumber(op: Op, number: dict[int, int]) -> Op:
    match op:
        case Input():
            return op
        case Sum() | Concat():
            return replace(op, sources=tuple(number[source] for source in op.sources))
        case Affine() | Relu() | MaxPool():
            return replace(op, source=number[op.source])
        case _:
            assert_never(op)


def _tensor_arguments(n: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, as often as they stand there: x + x reads x twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((n.args, n.kwargs), found.append)
    return found


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
