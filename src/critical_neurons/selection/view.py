"""View: the model, or a draft of a smaller one in full size, as its consumers read it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from critical_neurons.core.structure import Bools
from critical_neurons.selection.consumers import ColumnBlock
from critical_neurons.selection.inverses import Inverses, invert


@dataclass(frozen=True, eq=False)
class View:
    """The model or a draft of it, the units that stay (with a last entry for NO_UNIT), and for every part of every
    consumer the covariance of its columns (`squares`) and that of the columns with the errors of its outputs
    (`missing`). `loss` is the distance of the draft's outputs from the model's; for `miss` see `Distance.miss`."""

    model: nn.Module
    stays: Bools
    squares: Mapping[str, Sequence[Tensor]]
    missing: Mapping[str, Sequence[Tensor | None]]
    inverses: Inverses
    loss: float = 0.0
    miss: float = 0.0

    def refit(self, module: str, number: int, part: ColumnBlock, inside: Tensor) -> tuple[Tensor, Tensor]:
        """H and weights of a part that reads these columns, refitted to what they are here."""
        missing, own, weight = self.missing[module][number], self.squares[module][number], part.weight
        if inside.all():
            inverse = self.inverses.find(module, number)
        else:
            own, weight = own[inside][:, inside], weight[inside]
            inverse = invert(own)
        if missing is None:
            return inverse, weight
        gone = torch.from_numpy(~self.stays[part.units])[inside]
        return inverse, weight + inverse @ (missing[inside] - own[:, gone].double() @ weight[gone])
