"""Assembly: the records of a labelled run to a structure."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from scipy import sparse
from scipy.sparse.csgraph import connected_components

from critical_neurons.core.structure import (
    NO_UNIT,
    Fingerprint,
    Structure,
)
from critical_neurons.structure.description import SINGLE, Numbered, describe, find_axes
from critical_neurons.structure.labels import NONE, Classes
from critical_neurons.structure.records import Multiplication
from critical_neurons.structure.run import LabelledRun

IGNORED = "ignored, as asked"
UNEVEN = "a grouped convolution reads it along with channels that stay"
LAST = "a layer keeps a channel"
SCATTERED = "a parameter that is used with it has it along more than one axis"


def assemble(run: LabelledRun, print_of: Fingerprint, ignore: Collection[str], notes: tuple[str, ...]) -> Structure:
    """The structure described by the labels. `ignore`: layers that lose nothing."""
    layers = _list_layers(run.multiplications)
    for each in layers:
        if each.name in ignore:
            run.labels.keep(each.outputs, IGNORED)
    while True:  # each check may unite further labels
        classes = run.labels.resolve()
        if _keep_weights_used_twice(run, classes):
            continue
        numbered = _number(layers, classes)
        if not (
            _keep_scattered(run, numbered, classes)
            or _deal_blocks(run, numbered, classes)
            or _keep_one_each(run, numbered, classes)
        ):
            break
    return describe(run, layers, numbered, classes, print_of, notes)


def _list_layers(multiplications: Sequence[Multiplication]) -> list[Multiplication]:
    """The first multiplication with every weight, in order."""
    first: dict[str, Multiplication] = {}
    for each in multiplications:
        if each.kernel:
            first.setdefault(each.tensor, each)
    return list(first.values())


def _number(layers: list[Multiplication], classes: Classes) -> Numbered:
    """Number the units, group by group; layers that share units form one group."""
    count = classes.count
    owned = [classes.find(each.outputs) for each in layers]
    ends = [(at, unit) for at, units in enumerate(owned) for unit in np.unique(units[units != NONE]).tolist()]
    one, other = np.array(ends, dtype=np.int64).reshape(-1, 2).T
    size = len(layers) + count
    graph = sparse.coo_array((np.ones(len(one)), (one, len(layers) + other)), shape=(size, size))
    component = connected_components(graph, directed=False)[1]
    number, group = np.full(count + 1, NO_UNIT), np.full(len(layers), NONE)
    sizes: list[int] = []
    first = 0
    for place in dict.fromkeys(component[: len(layers)].tolist()):
        members = [at for at in range(len(layers)) if component[at] == place]
        units = np.concatenate([owned[at] for at in members])
        units = units[units != NONE]
        if len(units) == 0:
            continue
        distinct, position = np.unique(units, return_index=True)
        if len(distinct) == 1:  # a single unit must stay: a layer is never emptied
            continue
        number[distinct[np.argsort(position)]] = np.arange(first, first + len(distinct))
        group[members] = len(sizes)
        sizes.append(len(distinct))
        first += len(distinct)
    return Numbered(number, tuple(sizes), group, {})


def _deal_blocks(run: LabelledRun, numbered: Numbered, classes: Classes) -> bool:
    """Grouped convolutions must lose equally many channels in every block. If the blocks are those of a whole group
    in order, the group gets blocks; otherwise channels at the same place of all blocks are united. Returns whether
    labels were united or must stay."""
    starts = np.cumsum([0, *numbered.sizes])
    for dealt in run.blocks:
        units = numbered.find(classes, dealt)
        if (units == NO_UNIT).all():
            continue
        if (units == NO_UNIT).any():
            run.labels.keep(dealt, UNEVEN)
            return True
        flat = units.flatten()
        place = int(np.searchsorted(starts, flat[0], side="right") - 1)
        whole = np.arange(starts[place], starts[place + 1])
        if np.array_equal(flat, whole):
            blocks = math.lcm(numbered.blocks.get(place, 1), len(units))
            if blocks < len(whole):
                numbered.blocks[place] = blocks
                continue
            run.labels.keep(dealt, SINGLE)
            return True
        if (units == units[:1]).all():
            continue
        run.labels.unite(dealt[:1], dealt)
        return True
    return False


def _keep_one_each(run: LabelledRun, numbered: Numbered, classes: Classes) -> bool:
    """A group keeps one unit per block. A layer that has only some of its units could lose all of them, so its first
    one must stay. Returns whether there is such a layer."""
    blocks: list[set[int]] = []
    for place, first in enumerate(np.cumsum([0, *numbered.sizes])[:-1].tolist()):
        units = np.arange(first, first + numbered.sizes[place]).reshape(numbered.blocks.get(place, 1), -1)
        blocks += [set(block) for block in units.tolist()]
    block_of = {unit: block for block in blocks for unit in block}
    found = False
    for each in run.multiplications:
        for labels in (each.inputs, each.outputs):
            units = numbered.find(classes, labels)
            own: set[int] = set(units.flatten().tolist())
            if NO_UNIT not in own and not any(block_of[unit] <= own for unit in own):
                run.labels.keep(labels[:1], LAST)
                found = True
    return found


def _keep_scattered(run: LabelledRun, numbered: Numbered, classes: Classes) -> bool:
    """Elementwise parameters can be sliced along one axis only. Returns whether any would need more."""
    for labels in run.parameters.elements.values():
        if len(find_axes(numbered.find(classes, labels))) > 1:
            run.labels.keep(labels, SCATTERED)
            return True
    return False


def _keep_weights_used_twice(run: LabelledRun, classes: Classes) -> bool:
    """A weight that is also used in another way cannot be sliced. Returns whether there is a new one."""
    for (tensor, _), labels in run.parameters.axes.items():
        twice = tensor in run.parameters.elements and run.parameters.named[tensor].ndim > 1
        if twice and (classes.find(labels) != NONE).any():
            run.labels.keep(labels, f"{tensor} is used in another way as well")
            return True
    return False
