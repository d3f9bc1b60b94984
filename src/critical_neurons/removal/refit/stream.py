"""Original and smaller model side by side on calibration inputs, from module to module.

Module after module, in the order in which they run, what the smaller model computes is brought back to what the
original computes there. Each module sees inputs that come through those already refitted.

The inputs stream through in batches. What both models know of every batch at one module is held for the next one
while it fits in memory; where it does not, the batches start anew from where it last did.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.refit.least_squares import REFITTED, Refit, begin_refit

Values: TypeAlias = dict[fx.Node, Any]

BATCH_SIZE = 64

HELD_OUT = 4
"""One batch of so many is held out: on it the regularisation is chosen."""

LEAST_INPUTS = 2 * HELD_OUT
"""With fewer, a single input would be held out."""

HELD_BYTES = 2**30
"""What the values held between two modules may take."""


@dataclass(frozen=True)
class Stop:
    """A module to refit, and which of the original's output channels it still has."""

    module: str
    kept: Tensor


@torch.no_grad()
def refit_modules(
    original: fx.GraphModule,
    smaller: fx.GraphModule,
    stops: Sequence[Stop],
    inputs: Tensor,
    method: Refit,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Refit the modules of `smaller` at the stops, as far as they are of a kind that can be.

    Both models, on the CPU in evaluation mode, are runs of one graph. `progress` is told how many stops are done, and
    of how many.
    """
    check_inputs(len(inputs))
    nodes = list(original.graph.nodes)
    places = {str(node.target): place for place, node in enumerate(nodes) if node.op == "call_module"}
    before, after = _Runner(original), _Runner(smaller)
    size = min(BATCH_SIZE, -(-len(inputs) // (2 * HELD_OUT)))
    shuffled = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))  # data comes class by class
    reached, held = 0, [_Batch(inputs[rows]) for rows in torch.split(shuffled, size)]
    known = [stop for stop in stops if isinstance(smaller.get_submodule(stop.module), REFITTED)]
    for done, stop in enumerate(sorted(known, key=lambda stop: places[stop.module])):
        progress(done, len(known))
        place = places[stop.module]
        node, way = nodes[place], nodes[reached:place]
        refit = begin_refit(smaller, node, stop.kept, method, len(inputs))
        fits = False
        for number, batch in enumerate(held):
            moved = batch if fits else batch.copy()
            before.advance(moved.before, way, batch.inputs)
            after.advance(moved.after, way, batch.inputs)
            read, found = (values[node.all_input_nodes[0]] for values in (moved.before, moved.after))
            before.advance(moved.before, [node])
            refit.add(read, moved.before[node], found, held_out=number % HELD_OUT == HELD_OUT - 1)
            fits = fits or (number == 0 and len(held) * moved.nbytes <= HELD_BYTES)
            if fits:
                held[number], reached = moved, place
        refit.finish()
    progress(len(known), len(known))


def check_inputs(count: int) -> None:
    if count < LEAST_INPUTS:
        raise InvalidInputError(f"calibration: found {count} inputs. Give {LEAST_INPUTS} or more.")


@dataclass(frozen=True)
class _Batch:
    """A part of the inputs, and the values the two models have computed from it and still need."""

    inputs: Tensor
    before: Values = field(default_factory=dict)
    after: Values = field(default_factory=dict)

    def copy(self) -> _Batch:
        """With values of its own: what works in place must not reach those that are held."""
        return _Batch(self.inputs, _copy(self.before), _copy(self.after))

    @property
    def nbytes(self) -> int:
        values = [*self.before.values(), *self.after.values()]
        return sum(value.nbytes for value in values if isinstance(value, Tensor))


def _copy(values: Values) -> Values:
    return {node: value.clone() if isinstance(value, Tensor) else value for node, value in values.items()}


class _Runner(fx.Interpreter):
    """Runs a model a few nodes at a time. Values are dropped after their last use."""

    def __init__(self, traced: fx.GraphModule) -> None:
        super().__init__(traced)
        self.extra_traceback = False

    def advance(self, values: Values, nodes: Sequence[fx.Node], inputs: Tensor | None = None) -> None:
        """Compute the nodes that are not among the values yet."""
        self.env, self.args_iter = values, iter([inputs if inputs is None else inputs.clone()])
        for node in nodes:
            if node not in values:
                values[node] = self.run_node(node)
                for spent in self.user_to_last_uses.get(node, ()):
                    values.pop(spent, None)
