"""Description: numbered classes of labels to a `Structure`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.structure import (
    NO_UNIT,
    SIZE,
    Fingerprint,
    Ints,
    Layer,
    Product,
    Slice,
    Structure,
    Wiring,
)
from critical_neurons.structure.labels import Classes
from critical_neurons.structure.records import Multiplication
from critical_neurons.structure.run import LabelledRun

SINGLE = "all of its channels can only be removed together"


@dataclass(frozen=True, eq=False)
class Numbered:
    """The unit of every class, the sizes of groups, the group of every layer (NONE if nothing can go), and blocks by
    group."""

    number: Ints
    sizes: tuple[int, ...]
    group: Ints
    blocks: dict[int, int]

    def find(self, classes: Classes, labels: Tensor) -> Ints:
        return self.number[classes.find(labels)]


def find_axes(units: Ints) -> list[int]:
    """Axes along which units vary."""
    return [axis for axis in range(units.ndim) if (units != units.take([0], axis=axis)).any()]


def describe(
    run: LabelledRun,
    layers: list[Multiplication],
    numbered: Numbered,
    classes: Classes,
    print_of: Fingerprint,
    notes: tuple[str, ...],
) -> Structure:
    listed = []
    for each, group in zip(layers, numbered.group.tolist(), strict=True):
        units, reason, stays = numbered.find(classes, each.outputs), "", ""
        if (units == NO_UNIT).all():
            reason = classes.explain(each.outputs) or SINGLE
        elif (units == NO_UNIT).any():
            stays = classes.explain(each.outputs[torch.from_numpy(units == NO_UNIT)])
        listed.append(Layer(each.name, each.kind, units, reason, numbered.blocks.get(group, 1), stays))
    listed += [
        Layer(left.name, left.kind, np.full(left.size, NO_UNIT), left.reason)
        for left in run.left_alone
        if left.name not in {layer.name for layer in listed}
    ]
    called = {name: place for place, name in enumerate(run.flow.reads)}
    listed.sort(key=lambda layer: called.get(layer.name, len(called)))
    slices = [
        Slice(tensor, axis, units)
        for (tensor, axis), labels in run.parameters.axes.items()
        if ((units := numbered.find(classes, labels)) != NO_UNIT).any()
    ]
    for tensor, labels in run.parameters.elements.items():
        units = numbered.find(classes, labels)
        slices += [
            Slice(tensor, axis, units.swapaxes(0, axis).reshape(units.shape[axis], -1)[:, 0])
            for axis in find_axes(units)
        ]
    for name, labels in run.sizes.items():
        if ((units := numbered.find(classes, labels)) != NO_UNIT).any():
            slices.append(Slice(name, SIZE, units))
    slices += _list_used_sizes(run, numbered, classes)
    return Structure(
        tuple(listed),
        numbered.sizes,
        tuple(slices),
        tuple(_list_wirings(run, numbered, classes)),
        tuple(_count_parameters(run.model, slices)),
        tuple(_count_macs(run, numbered, classes)),
        print_of,
        notes,
        kept_streams=tuple(run.flow.list_streams(layer.name for layer in listed if not layer.removable)),
    )


def _list_used_sizes(run: LabelledRun, numbered: Numbered, classes: Classes) -> list[Slice]:
    """Integer attributes of modules that shrink with one axis, consistently wherever they are used."""
    found: dict[str, list[Ints]] = {}
    for name, labels, axis in run.used_sizes:
        units = numbered.find(classes, labels)
        if find_axes(units) != [axis] and (units != NO_UNIT).any():
            continue  # another axis shrinks instead
        found.setdefault(name, []).append(units.swapaxes(0, axis).reshape(units.shape[axis], -1)[:, 0])
    return [
        Slice(name, SIZE, several[0])
        for name, several in found.items()
        if name not in run.sizes
        and (several[0] != NO_UNIT).any()
        and all(np.array_equal(each, several[0]) for each in several)
    ]


def _list_wirings(run: LabelledRun, numbered: Numbered, classes: Classes) -> list[Wiring]:
    """In the order of calls. A module that is called more than once is not `alone`."""
    calls: dict[str, list[Multiplication]] = {}
    for each in run.multiplications:
        if each.kernel == 0 or _is_weighted(run, each):
            calls.setdefault(each.name, []).append(each)
    wirings = []
    for name, several in calls.items():
        first = several[0]
        inputs = numbered.find(classes, first.inputs)
        same = all(torch.equal(other.constants, first.constants) for other in several)
        constants = first.constants.double().numpy() if same else np.zeros(len(inputs))
        wirings.append(
            Wiring(
                name,
                inputs,
                numbered.find(classes, first.outputs),
                np.where(inputs == NO_UNIT, 0.0, constants),
                first.kernel,
                first.positions,
                first.groups,
                first.biased,
                len(several) == 1 and first.alone,
            )
        )
    return wirings


def _is_weighted(run: LabelledRun, each: Multiplication) -> bool:
    """Whether a linear layer or convolution owns the weight."""
    owner = run.parameters.find_module(each.tensor)
    return owner is not None and isinstance(run.model.get_submodule(owner), nn.Linear | nn.modules.conv._ConvNd)


def _count_parameters(model: nn.Module, slices: Sequence[Slice]) -> list[Product]:
    axes: dict[str, list[Ints]] = {}
    for each in slices:
        axes.setdefault(each.tensor, []).append(each.units.flatten())
    return [
        Product(name.rpartition(".")[0], values.numel(), tuple(axes.get(name, ())))
        for name, values in model.named_parameters()
    ]


def _count_macs(run: LabelledRun, numbered: Numbered, classes: Classes) -> list[Product]:
    products = []
    for cost in run.costs:
        axes = (numbered.find(classes, labels) for labels in cost.axes)
        products.append(Product(cost.module, cost.macs, tuple(units for units in axes if (units != NO_UNIT).any())))
    return products
