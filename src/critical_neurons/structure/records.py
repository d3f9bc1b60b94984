"""Records: what a labelled run notes down of products with weights, and of what it leaves as it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Multiplication:
    """One call that multiplies with a weight: the labels of what it reads and of what it gives, and what removed
    inputs leave. `name`: the module that owns the weight, or else the weight; `alone`: that module makes the call."""

    tensor: str
    name: str
    kind: str
    inputs: Tensor
    outputs: Tensor
    constants: Tensor
    kernel: int
    positions: int
    groups: int
    biased: bool
    alone: bool


@dataclass(frozen=True, eq=False)
class Cost:
    """Multiply-adds of a module for one input, and the labels along every axis that can shrink."""

    module: str
    macs: int
    axes: tuple[Tensor, ...]


@dataclass(frozen=True)
class LeftAlone:
    """A module that is listed, but loses nothing."""

    name: str
    kind: str
    size: int
    reason: str
