"""Registry: `@reads(nn.Conv2d)` registers a reader, which says what a call means to a network."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from critical_neurons.core.network import LinearMap, Shape
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.errors import UnreadableModelError

NO_PROGRAM = "cn.search and cn.compress need no program and work all the same."

SPAN_ADVICE = (
    "If it lies before or behind all that is to be scored, name the part in between with start= and stop=. "
    f"{NO_PROGRAM}"
)

LEFT_OUT = "is left out: the program works on the logits before it"
"""The note about a final activation that keeps the order of the outputs."""

SLICEABLE = (
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose1d, nn.ConvTranspose2d),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.PReLU),
)
"""Modules whose parameters removal can slice by channel."""


@dataclass(frozen=True)
class TracedCall:
    """One call of a module, function or tensor method in the traced forward, run on an example in float64."""

    name: str
    function: Callable[..., Any]
    """What was called: a function, or the module itself."""
    module: nn.Module | None
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    inputs: tuple[Tensor, ...]
    output: Tensor
    literal_sizes: tuple[int, ...]
    part: int | None = None
    """The index of `output` among several results, as of torch.chunk."""

    @property
    def input(self) -> Tensor:
        return self.inputs[0]

    @property
    def input_shape(self) -> Shape:
        """The shape of one data point; a single number is one channel."""
        return tuple(self.input.shape[1:]) or (1,)

    @property
    def output_shape(self) -> Shape:
        return tuple(self.output.shape[1:]) or (1,)

    def argument(self, position: int, keyword: str, default: Any = None) -> Any:
        """An argument given by position (0 is the input) or by keyword."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(keyword, default)

    def setting(self, position: int, keyword: str, default: Any = None) -> Any:
        """A module's attribute, or the argument of the same name of its functional form."""
        return self.argument(position, keyword, default) if self.module is None else getattr(self.module, keyword)

    def refuse(self, found: str, advice: str) -> UnreadableModelError:
        return UnreadableModelError(f"{self.name}: {found}. {advice} {SPAN_ADVICE}")


@dataclass(frozen=True)
class Mixes:
    """New units from all input channels, or from those of a group: a linear layer, a convolution.

    `axis`: that of the channels, not counting the batch. `padded`: the input is zero-padded. `obstacle`: why neither
    inputs nor outputs can be removed, if so.
    """

    map: LinearMap
    groups: int = 1
    padded: bool = False
    obstacle: str = ""
    axis: int = 0


@dataclass(frozen=True)
class Filters:
    """A layer that computes every channel from one input channel: a depthwise convolution."""

    map: LinearMap
    padded: bool = False


@dataclass(frozen=True)
class Scales:
    """A factor and an offset per channel: batch norm, constants.

    `obstacle`: why the channels must stay, if so; removal slices what belongs to a module alone.
    """

    scale: Floats
    offset: Floats
    obstacle: str = ""


@dataclass(frozen=True)
class KeepsChannels:
    """A linear map of each channel by itself: average pooling.

    `keeps_constants`: constant channels keep their value. `axes`: where the channels lie before and after, not
    counting the batch.
    """

    map: LinearMap
    keeps_constants: bool = False
    axes: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Reshapes:
    """The same elements in another shape. `obstacle`: why the channels before it must stay, if so."""

    obstacle: str = ""


@dataclass(frozen=True, eq=False)
class Rearranges:
    """Every output element is an input element or zero: slices, permutations, padding of channels.

    `elements` (output shape): flat indices into one data point of the input, `NO_POSITION` for zero.
    """

    elements: Ints


@dataclass(frozen=True, eq=False)
class Rectifies:
    """min(max(0, x), ceiling) - slope min(max(0, -x), depth): ReLU, ReLU6, LeakyReLU, PReLU, Hardtanh, |x|.

    `slope`: one number, or one per channel. `ceiling` and `depth` are optional. `obstacle`: why the channels must
    stay, if so.
    """

    ceiling: float | None = None
    slope: float | Floats = 0.0
    depth: float | None = None
    obstacle: str = ""

    def apply(self, values: Floats) -> Floats:
        """Apply to one data point."""
        slope = np.reshape(self.slope, (-1, *[1] * (values.ndim - 1)))
        bent: Floats = np.clip(values, 0.0, self.ceiling) - slope * np.clip(-values, 0.0, self.depth)
        return bent

    @property
    def is_relu(self) -> bool:
        """Whether negative numbers become zero."""
        return not np.any(self.slope)

    @property
    def nonnegative(self) -> bool:
        return bool(np.all(np.asarray(self.slope) <= 0))


@dataclass(frozen=True)
class PoolsMaximum:
    """`windows` as in `network.MaxPool`."""

    windows: Ints


@dataclass(frozen=True)
class Adds:
    """The sum of its inputs; `difference`: the first of two minus the second."""

    difference: bool = False


@dataclass(frozen=True)
class TakesMaximum:
    """The larger of two inputs, element by element; `smaller`: the smaller of them."""

    smaller: bool = False


@dataclass(frozen=True)
class Concatenates:
    """Concatenation along the channels."""


@dataclass(frozen=True)
class Passes:
    """The identity in evaluation mode."""


@dataclass(frozen=True)
class Ends:
    """A final activation that programs leave out, because it keeps the order of the logits: softmax."""

    note: str


Reading: TypeAlias = (
    Mixes
    | Filters
    | Scales
    | KeepsChannels
    | Reshapes
    | Rearranges
    | Rectifies
    | PoolsMaximum
    | Adds
    | TakesMaximum
    | Concatenates
    | Passes
    | Ends
)
Reader: TypeAlias = Callable[[TracedCall], Reading]
Target: TypeAlias = "type[nn.Module] | Callable[..., Any] | str"

_readers: dict[Target, Reader] = {}


def reads(*targets: Target) -> Callable[[Reader], Reader]:
    """Register a reader for module types, functions, or names of tensor methods.

    A module is looked up by its exact type; a subclass is read like its parent only if it inherits `forward`.

    >>> from critical_neurons.readers.registry import Rectifies
    >>> class Positive(nn.Module):
    ...     def forward(self, values):
    ...         return values.clamp(min=0)
    >>> @cn.reads(Positive)
    ... def read_positive(call):
    ...     return Rectifies()
    >>> layers = nn.Sequential(nn.Linear(4, 5), Positive(), nn.Linear(5, 3))
    >>> cn.score(layers, torch.rand(3, 4)).status
    <Status.OPTIMAL: 'optimal'>
    """

    def register(reader: Reader) -> Reader:
        for target in targets:
            _readers[target] = reader
        return reader

    return register


def find_module_reader(module: nn.Module) -> Reader | None:
    for parent in type(module).__mro__:
        if parent in _readers:
            inherited = type(module).forward is parent.forward  # type: ignore[attr-defined]
            return _readers[parent] if inherited else None
    return None


def overrides_readable(module: nn.Module) -> bool:
    """Whether it is a subclass of a readable layer with its own `forward`, which must not be read as its parent."""
    return find_module_reader(module) is None and any(parent in _readers for parent in type(module).__mro__)


def find_reader(target: Target) -> Reader | None:
    return _readers.get(target)


def readable_layers() -> list[str]:
    return sorted(target.__name__ for target in _readers if isinstance(target, type))
