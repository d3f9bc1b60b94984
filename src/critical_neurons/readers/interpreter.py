"""Interpreter: run a traced model on an example, and let the reader of every call inside the span describe it."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import is_parametrized

from critical_neurons.core.deadline import check_time
from critical_neurons.errors import InvalidInputError, InvalidSettingError, UnreadableModelError
from critical_neurons.readers.fx_nodes import DIVISIONS, find_literal_sizes, list_arguments, name_call
from critical_neurons.readers.lowering import OpCollector
from critical_neurons.readers.registry import (
    NO_PROGRAM,
    SLICEABLE,
    SPAN_ADVICE,
    Adds,
    Concatenates,
    Ends,
    Reader,
    Reading,
    Rectifies,
    Scales,
    TakesMaximum,
    TracedCall,
    find_module_reader,
    find_reader,
    overrides_readable,
    readable_layers,
)
from critical_neurons.readers.subgraph import PLAIN, Border, Cut


class Walk(fx.Interpreter):
    """Runs the traced model and collects the ops of every call inside the span.

    Afterwards `entering` is the input of the span, `leaving` its output, and `logits` those of the model;
    `differentiable`: autograd can differentiate the logits by `leaving`.
    """

    def __init__(self, traced: fx.GraphModule, cut: Cut, *, differentiable: bool = False) -> None:
        super().__init__(traced)
        self.extra_traceback = False  # our messages are for users of models, not of torch.fx
        self.collector = OpCollector()
        self.last = 0
        self.notes: list[str] = []
        self.entering: Tensor
        self.leaving: Tensor
        self.logits: Tensor
        self.ended = ""
        self._value_of: dict[fx.Node, int] = {}
        self._parts_of: dict[fx.Node, list[int]] = {}
        self._cut = cut
        self._border = Border(cut)
        self._differentiable = differentiable

    def run_node(self, n: fx.Node) -> Any:
        check_time()
        if n.op == "output":
            return self._finish(n)
        with torch.set_grad_enabled(self._differentiable and n in self._cut.behind):
            result = super().run_node(n)
        self._border.check(n, result)
        if n is self._cut.entry:
            self._start(n, result)
        elif n not in self._cut.inside:
            self._pass_by(n, result)
        elif any(source in self._parts_of for source in n.all_input_nodes):
            self._value_of[n] = self._take_part(n)
        elif any(source in self._value_of for source in n.all_input_nodes):
            if isinstance(result, Tensor):
                self._value_of[n] = self._read(n, result)
            elif n.target in DIVISIONS:
                self._parts_of[n] = [self._read(n, part, number) for number, part in enumerate(result)]
            elif not isinstance(result, PLAIN):
                raise UnreadableModelError(
                    f"{n.name}: it returns a {type(result).__name__}; only tensors are read. {SPAN_ADVICE}"
                )
        return self._leave(n, result) if n is self._cut.exit else result

    def _start(self, n: fx.Node, result: Any) -> None:
        self._stay_apart(n)
        if not isinstance(result, Tensor) or result.ndim < 2 or len(result) != self._border.batch_size:
            found = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
            raise InvalidSettingError(
                f"start: {self._cut.span.start} reads {found}; a span starts at a tensor of shape (batch, ...)."
            )
        start = self._cut.span.start
        require_finite(result, "the example" if start is None else f"what comes before {start}")
        self.entering = result.detach().clone()
        self._value_of[n] = self.collector.start(tuple(result.shape[1:]))

    def _leave(self, n: fx.Node, result: Any) -> Tensor:
        stop = self._cut.span.stop
        if self.ended:
            raise InvalidSettingError(
                f"stop: {stop} is or follows {self.ended}; programs work on the logits before it. Leave stop out."
            )
        if n not in self._value_of:
            raise InvalidSettingError(f"stop: {stop} gives no tensor that comes from the input.")
        with torch.set_grad_enabled(self._differentiable):
            self.leaving = result.detach().clone().requires_grad_(self._differentiable)
            return self.leaving.clone()  # what follows may change it in place

    def _pass_by(self, n: fx.Node, result: Any) -> None:
        """A call outside the span. A softmax at the end of the model is left out in any case."""
        self._stay_apart(n)
        returned = any(user.op == "output" for user in n.users)
        if n not in self._cut.behind or not returned or not isinstance(result, Tensor) or result.ndim != 2:
            return
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        reader = find_module_reader(module) if module is not None else find_reader(n.target)
        call = self._call(n, module, result)
        with suppress(UnreadableModelError):
            reading = reader(call) if reader is not None and call.inputs else None
            if isinstance(reading, Ends):
                self._end(call, reading)

    def _stay_apart(self, n: fx.Node) -> None:
        if n.op == "call_module":
            self.collector.pass_by(str(n.target), self.fetch_attr(str(n.target)))

    def _end(self, call: TracedCall, reading: Ends) -> None:
        self.logits, self.ended = call.input, call.name
        self.notes.append(reading.note)

    def _read(self, n: fx.Node, result: Tensor, part: int | None = None) -> int:
        """The value of a call; `part`: which of several outputs."""
        if self.ended:
            raise UnreadableModelError(f"{n.name}: it follows {self.ended}, which is read only as the last step.")
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        reader = self._reader(n, module)
        call, nodes = replace(self._call(n, module, result), part=part), self._tensors(n)
        if not all(node in self._value_of for node in nodes):
            raise call.refuse("it reads a tensor that does not come from the input", "Make it part of a layer.")
        sources = tuple(self._value_of[node] for node in nodes)
        reading = reader(call)
        if len(sources) != 1 and not isinstance(reading, Adds | Concatenates | TakesMaximum):
            raise call.refuse(
                "it joins several values", "They are joined by x + y, x - y, torch.maximum and torch.cat only."
            )
        self._check_constants(n, call, reading)
        if isinstance(reading, Ends):
            self._end(call, reading)
        return self.collector.note(call, reading, sources)

    def _take_part(self, n: fx.Node) -> int:
        source = n.args[0]
        if n.target is operator.getitem and isinstance(source, fx.Node) and isinstance(n.args[1], int):
            return self._parts_of[source][n.args[1]]
        raise UnreadableModelError(
            f"{name_call(n)}: it reads all parts of a tensor at once. They are read one by one, as in "
            f"a, b = x.chunk(2, 1). {NO_PROGRAM}"
        )

    def _check_constants(self, n: fx.Node, call: TracedCall, reading: Reading) -> None:
        """Other arguments must be constants for arithmetic, and sizes for other calls."""
        others = [node for node in list_arguments(n) if node not in self._value_of]
        constant = call.module is None and isinstance(reading, Scales | Rectifies)
        if not constant and any(isinstance(self.env[node], Tensor) for node in others):
            raise call.refuse("it reads a tensor that does not come from the input", "Make it part of a layer.")
        if isinstance(reading, Scales | Rectifies) and any(node in self._cut.carried for node in others):
            raise call.refuse(
                "it calculates with a size, which may be another for other data or once units are removed",
                "Write the number out.",
            )

    def _call(self, n: fx.Node, module: nn.Module | None, result: Tensor) -> TracedCall:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return TracedCall(
            name=name_call(n),
            function=module if module is not None else n.target,  # type: ignore[arg-type]
            module=module,
            args=args,
            kwargs=kwargs,
            inputs=tuple(self.env[node] for node in self._tensors(n)),
            output=result,
            literal_sizes=find_literal_sizes(n),
        )

    def _tensors(self, n: fx.Node) -> list[fx.Node]:
        """The arguments that depend on the input, without constants."""
        return [
            node for node in list_arguments(n) if node in self._cut.carried and isinstance(self.env[node], Tensor)
        ]

    def _finish(self, n: fx.Node) -> Any:
        result = n.args[0]
        if not isinstance(result, fx.Node):
            kind = type(result).__name__.removeprefix("immutable_")  # torch.fx has its own
            raise UnreadableModelError(
                f"the model returns a {kind}; a single tensor of logits (batch, classes) is read. Wrap it in a "
                f"module that returns the logits alone. {NO_PROGRAM}"
            )
        value, last = self.env[result], self._cut.exit or result
        if (
            last not in self._value_of
            or not isinstance(value, Tensor)
            or value.ndim not in (1, 2)
            or len(value) != self._border.batch_size
        ):
            found = f"tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise UnreadableModelError(
                f"the model returns a {found}; outputs of shape (batch, outputs) are read, or (batch,). {NO_PROGRAM}"
            )
        require_finite(value, "the model")
        if not self.ended:
            self.logits = value if self._cut.exit is None else self._undo_softmax(value)
        with torch.set_grad_enabled(self._differentiable):
            self.logits = self.logits.reshape(len(value), -1)
        if self._cut.exit is None:
            self.leaving = self.logits
        self.last = self._value_of[last]
        return value

    def _undo_softmax(self, outputs: Tensor) -> Tensor:
        """Probabilities come from a softmax inside an unread call."""
        if outputs.ndim == 1 or outputs.shape[1] == 1 or not are_probabilities(outputs):
            return outputs
        self.notes.append("the model returns probabilities: the program works on their logarithms")
        with torch.set_grad_enabled(self._differentiable):
            return take_logarithms(outputs)

    def _reader(self, n: fx.Node, module: nn.Module | None) -> Reader:
        if module is not None:
            refuse_hooked_weights(str(n.target), module)
        if module is not None and is_parametrized(module):
            raise UnreadableModelError(
                f"{n.target}: its weights are parametrised. Make them plain with "
                f"torch.nn.utils.parametrize.remove_parametrizations first. {SPAN_ADVICE}"
            )
        reader = find_module_reader(module) if module is not None else find_reader(n.target)
        if reader is None:
            raise UnreadableModelError(_unreadable(n, module, self._cut.opaque.get(str(n.target), "")))
        return reader


def are_probabilities(outputs: Tensor) -> bool:
    """Whether the outputs (batch, classes) are probabilities, as of a softmax."""
    return not (outputs < 0).any() and torch.allclose(outputs.sum(1), torch.ones_like(outputs[:, 0]))


def take_logarithms(probabilities: Tensor) -> Tensor:
    """Logits that a softmax turns into these probabilities."""
    return probabilities.clamp_min(torch.finfo(probabilities.dtype).tiny).log()


def require_finite(values: Tensor, where: str) -> None:
    if not torch.isfinite(values).all():
        raise InvalidInputError(f"{where} has NaN or infinite values at some of the data points.")


def refuse_hooked_weights(name: str, module: nn.Module) -> None:
    if isinstance(module, SLICEABLE) and "weight" not in module._parameters and not is_parametrized(module):
        raise UnreadableModelError(
            f"{name}: its weight is computed by a hook (weight_norm, spectral_norm, torch.nn.utils.prune). Make it "
            f"plain first, with remove_weight_norm, remove_spectral_norm or prune.remove. {SPAN_ADVICE}"
        )


def _unreadable(n: fx.Node, module: nn.Module | None, untraced: str) -> str:
    found = type(module).__name__ if module is not None else getattr(n.target, "__name__", str(n.target))
    why = (
        ", a subclass of a readable layer with a forward of its own" if module and overrides_readable(module) else ""
    )
    if untraced:
        why = f", whose forward torch.fx cannot trace ({untraced})"
    return (
        f"{name_call(n)}: cannot read {found}{why}. Readable layers: {', '.join(readable_layers())}, and their "
        f"functional forms. Register a reader with @critical_neurons.reads({found}). {SPAN_ADVICE}"
    )
