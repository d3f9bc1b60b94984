"""The public `inspect`: what would be scored and what would not."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from critical_neurons.core.batch import gather_batch
from critical_neurons.core.network import Network
from critical_neurons.core.settings import as_names
from critical_neurons.readers import on_cpu, read_network


@on_cpu
def inspect(
    model: nn.Module,
    example: Any,
    *,
    ignore: Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
) -> Network:
    """What would be scored and what would not, with reasons: print the result. `example` is a batch of inputs.

    `ignore`, `start` and `stop` as in `score`.
    """
    rows = torch.from_numpy(gather_batch(example).inputs)
    return read_network(model, rows, ignore=as_names(ignore), start=start, stop=stop)
