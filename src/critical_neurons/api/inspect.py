"""The public `inspect`: what could be removed and what could not."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from critical_neurons.core.settings import as_names
from critical_neurons.core.structure import Structure
from critical_neurons.readers import isolated
from critical_neurons.removal.rows import gather_inputs
from critical_neurons.structure import find_structure, select_span


@isolated
def inspect(
    model: nn.Module,
    example: Any,
    *,
    ignore: str | Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
) -> Structure:
    """The structure of any model: its layers, which units are removed together, what must stay and why.

    Found by one run on a few rows of `example`: a tensor or array, a tuple or dict of them for a model of several
    inputs, or an iterable of batches. `ignore`, `start` and `stop` as in `search`.

    >>> print(cn.inspect(model, inputs))
    0  Conv2d       4 units  yes
    3  Linear       8 units  yes
    5  Linear       3 units  it gives the network's output
    """
    found = find_structure(model, gather_inputs(example), ignore=as_names(ignore))
    return select_span(found, start, stop)
