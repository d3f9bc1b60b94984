"""Records: multiplications with weights, costs and untouched modules seen in a labelled run."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Multiplication:
    """A multiplication with a weight: the labels of its inputs and outputs, and the constants that removed inputs
    leave. `name`: the module that owns the weight, or else the weight; `alone`: that module makes the call."""

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
    """Multiply-adds of a module for one input, and the labels of every axis that can shrink."""

    module: str
    macs: int
    axes: tuple[Tensor, ...]


@dataclass(frozen=True)
class LeftAlone:
    """A module that is listed but loses nothing."""

    name: str
    kind: str
    size: int
    reason: str
