"""Trace: nn.Module to Network, by torch.fx and one run on an example."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx, nn

from critical_neurons.core.network import Network
from critical_neurons.core.span import Span
from critical_neurons.core.structure import Structure
from critical_neurons.errors import (
    CriticalNeuronsError,
    InvalidInputError,
    InvalidSettingError,
    PlanMismatchError,
    UnreadableModelError,
    first_line,
)
from critical_neurons.readers.interpreter import Walk, refuse_hooked_weights
from critical_neurons.readers.isolation import isolated
from critical_neurons.readers.registry import NO_PROGRAM, SPAN_ADVICE, find_module_reader, overrides_readable
from critical_neurons.readers.subgraph import Cut, cut_out
from critical_neurons.removal.copies import copy_whole
from critical_neurons.structure import OUTPUT, check_model, find_structure, fingerprint, unwrap

READING_TOLERANCE = 1e-9
"""Largest relative difference between the logits of the model and of the network read from it."""

UNREAD = "the outputs do not depend on it"

EXAMPLE_SIZE = 3
"""Rows in the tracing run: more than one, to detect a forward pass that changes the batch axis."""


@isolated
def read_network(
    model: nn.Module,
    example: Tensor,
    *,
    ignore: Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    structure: Structure | None = None,
) -> Network:
    """Describe `model` as affine maps and ReLUs in float64. The model is not changed.

    `example` is a batch of inputs, of which a few rows are used to find shapes and to check the result. Layers in
    `ignore` get no scores. With `start` or `stop` only the span between these modules, both included, is read; the
    rest is run as it is. `structure` is the model's, if it is known already.

    >>> network = cn.read_network(model, inputs)
    >>> network.unit_count
    12
    """
    span, source = Span(start, stop), unwrap(model)
    check_weights(source, span)
    if not isinstance(example, Tensor) or example.ndim < 2 or len(example) == 0:
        raise InvalidInputError(
            "example: give a batch of inputs, a tensor of shape (batch, ...) with at least one row."
        )
    rows = example[torch.arange(EXAMPLE_SIZE) % len(example)].detach().to("cpu", torch.float64)
    runnable = copy_for_reading(source)
    walk = Walk(*trace_model(runnable, span))
    with torch.no_grad():
        try:
            walked = walk.run(rows.clone())
            expected = runnable(rows.clone())
        except CriticalNeuronsError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise InvalidInputError(
                f"the model does not run on inputs of shape {tuple(example.shape)}: {first_line(error)}. Give inputs "
                "as the model takes them."
            ) from error
    reason = OUTPUT if stop is None else "it feeds what follows the span"
    ops, outgoing = walk.collector.keep_reachable(walk.last), walk.collector.channels[walk.last]
    found = walk.collector.tracker.finish(outgoing, reason)
    unknown = sorted(set(ignore) - set(found.units))
    if unknown:
        listed = ", ".join(found.units)
        raise InvalidSettingError(f"ignore: no layer is called {', '.join(unknown)}. Layers: {listed}.")
    whole = find_structure(source, example, ignore=ignore) if structure is None else structure
    inside = whole if span.whole else whole.within(found.modules)
    unread = {layer.name: UNREAD for layer in inside.layers if layer.name not in found.units}
    scored, _ = inside.restrict({**unread, **found.reasons})
    network = Network(found.number(scored, ops), scored, (*walk.notes, *span.notes), span)
    read = torch.from_numpy(network.forward(walk.entering.numpy()))
    _check_reading((read, walk.leaving), (walked, expected))
    return network


def copy_for_reading(model: nn.Module) -> nn.Module:
    """A float64 copy on the CPU in evaluation mode."""
    try:
        return copy_whole(model).to("cpu", torch.float64).eval()
    except (RuntimeError, TypeError) as error:
        raise UnreadableModelError(
            f"{type(model).__name__}: it cannot be copied ({first_line(error)}). Does it keep activations or other "
            "results of a run as attributes?"
        ) from error


def check_weights(model: nn.Module, span: Span) -> None:
    check_model(model)
    for name, module in model.named_modules() if span.whole else ():  # hooked weights may not even be copied
        refuse_hooked_weights(name, module)
    for name, values in [*model.named_parameters(), *model.named_buffers()]:
        if values.dtype in (torch.float16, torch.bfloat16):
            raise UnreadableModelError(
                f"{name}: half precision ({values.dtype}) is not read. Convert the model with model.float() first."
            )
        if values.is_floating_point() and not torch.isfinite(values.detach()).all():
            raise InvalidInputError(f"{name}: the model has NaN or infinite weights.")


def check_architecture(model: nn.Module, architecture: str, subject: str) -> None:
    """Whether the model is the one that the subject, a plan or scores, was made for."""
    if fingerprint(model).architecture != architecture:
        raise PlanMismatchError(
            f"{subject} made for another network: names or shapes of the parameters differ from this model's. "
            "Score this model anew."
        )


TRACING = threading.Lock()
"""Two traces at once would undo each other's changes of nn.Module."""


class _Tracer(fx.Tracer):
    """Treats as leaves every layer with a reader, subclasses that must not be read as their parent, and opaque
    modules."""

    def __init__(self, opaque: Collection[str]) -> None:
        super().__init__()
        self._opaque, self._thread = opaque, threading.get_ident()
        self.failed = ""
        """The innermost module, not opaque yet, whose forward raised."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return (
            find_module_reader(m) is not None
            or overrides_readable(m)
            or module_qualified_name in self._opaque
            or super().is_leaf_module(m, module_qualified_name)
        )

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:  # torch changes nn.Module for all threads while it traces
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            path = self.path_of_module(m)
            if not self.failed and path not in self._opaque:
                self.failed = path
            raise


def trace_model(model: nn.Module, span: Span) -> tuple[fx.GraphModule, Cut]:
    """The graph of the model, and where the span lies in it.

    With a span, a module that cannot be traced becomes a single call, unless an end of the span lies in it.
    """
    opaque: dict[str, str] = {}
    while True:
        tracer = _Tracer(opaque)
        try:
            with TRACING:
                graph = tracer.trace(model)
            break
        except Exception as error:
            ends = (span.start or "", span.stop or "")
            if span.whole or not tracer.failed or any(end.startswith(f"{tracer.failed}.") for end in ends):
                where = f"the forward of {tracer.failed}" if tracer.failed else "the forward"
                raise UnreadableModelError(
                    f"{type(model).__name__}: {where} cannot be traced by torch.fx ({first_line(error)}). Control "
                    "flow that depends on values or sizes must go, or the part that needs it must become a layer "
                    f"with a reader (@reads). {SPAN_ADVICE}"
                ) from error
            opaque[tracer.failed] = first_line(error)
    inputs = [node for node in graph.nodes if node.op == "placeholder" and not node.args]
    if len(inputs) != 1:
        names = ", ".join(node.name for node in inputs)
        raise UnreadableModelError(
            f"the forward has several inputs ({names}); networks with one are read. {NO_PROGRAM}"
        )
    traced = fx.GraphModule(model, graph)
    traced.graph.eliminate_dead_code()
    return traced, cut_out(traced.graph, span, opaque, [name for name, _ in model.named_modules()])


def _check_reading(*pairs: tuple[Tensor, Tensor]) -> None:
    """Raise unless found and expected values agree."""
    for found, expected in pairs:
        difference = float((found - expected).abs().max())
        if not difference <= READING_TOLERANCE * max(1.0, float(expected.abs().max())):
            raise UnreadableModelError(
                f"the network read from the model gives other logits than the model (difference {difference:.2e}). "
                "Hooks, in-place changes of shared values or a forward that reads more than its input are not read."
            )
