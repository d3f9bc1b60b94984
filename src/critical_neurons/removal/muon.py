"""Muon: an optimiser with steps along orthogonalised momentum (Jordan et al., 2024). It needs fewer steps than Adam.

The momentum of a weight matrix has a few large singular values, and Adam follows those. With all singular values near
one, the rare directions are learned as fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOMENTUM = 0.9

CURVE = (3.4445, -4.775, 2.0315)
"""Coefficients of x, x³ and x⁵. Applied five times, this takes any x between 0.01 and 1 to about one."""

ROUNDS = 5

STEP_SIZE = 0.2
"""Root mean square of the entries of a step, at a learning rate of one: about that of Adam, so that both share it."""

WIDEST = 1024
"""Matrices with more rows and columns than this take steps of Adam: making them orthogonal would take too long."""


class Muon:
    """For matrices and the kernels of convolutions, (outputs, rest); steps of Adam for all other weights."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._matrices = [each for each in weights if each.ndim > 1 and 0 < min(_sides(each)) <= WIDEST]
        mine = set(map(id, self._matrices))
        others = [each for each in weights if id(each) not in mine]
        self._adam = torch.optim.AdamW(others, weight_decay=0.0) if others else None
        self._momenta = [torch.zeros_like(each) for each in self._matrices]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        if self._adam is not None:
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
        for weight, momentum in zip(self._matrices, self._momenta, strict=True):
            if weight.grad is None or not weight.grad.any():  # old momentum would be made as long as a whole step
                continue
            momentum.mul_(MOMENTUM).add_(weight.grad)
            along = orthogonalise(weight.grad.add(momentum, alpha=MOMENTUM).flatten(1))
            weight.add_(along.view_as(weight), alpha=-rate * STEP_SIZE * max(along.shape) ** 0.5)


def orthogonalise(matrix: Tensor) -> Tensor:
    """Nearly the nearest matrix with orthonormal rows or columns, whichever are fewer.

    The polynomial is found for the smaller of the two products of the matrix with itself, and applied once.
    """
    if len(matrix) > matrix.shape[1]:
        return orthogonalise(matrix.T).T
    tiny = torch.finfo(matrix.dtype).tiny
    matrix = matrix / matrix.abs().amax().clamp(min=tiny)  # squares of small numbers would vanish in the norm
    matrix = matrix / matrix.norm().clamp(min=tiny)
    one, three, five = CURVE
    product = matrix @ matrix.T
    total = identity = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)
    for _ in range(ROUNDS):
        factor = one * identity + three * product + five * product @ product
        total, product = factor @ total, factor @ product @ factor
    return total @ matrix


def _sides(weight: Tensor) -> tuple[int, int]:
    return len(weight), weight[:1].numel()
