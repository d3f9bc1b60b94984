"""Preferring: importances of units by other methods, from a network and calibration images.

Units of higher importance are kept. To be comparable between layers, importances are divided by the mean of their
layer, as in Torch-Pruning, except for LAMP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch_pruning
from torch import Tensor, nn
from torch.nn import functional
from torch_pruning.pruner import importance as tp

import critical_neurons as cn
from critical_neurons.core.structure import Floats, Group, Ints, Structure, Wiring
from critical_neurons.removal.metrics import predict
from critical_neurons.selection.consumers import split_module
from critical_neurons.selection.elimination import Consumer, eliminate, measure_error
from critical_neurons.selection.inverses import invert
from critical_neurons.selection.statistics import Moments, gather_moments
from critical_neurons_reproduction.baselines import measure_sensitivity
from critical_neurons_reproduction.score_settings import read_score_settings

BATCH_SIZE = 64


@dataclass(frozen=True, eq=False)
class Subject:
    """A trained network, calibration images and labels, and the settings of the paper's program for ten of them."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor
    program: Mapping[str, Any]

    @cached_property
    def structure(self) -> Structure:
        return cn.inspect(self.model, self.inputs[:4])

    @cached_property
    def moments(self) -> Mapping[str, Sequence[Moments]]:
        """Moments of the inputs of every module that reads units, by part; no network has grouped convolutions."""
        model = self.copy_model()
        parts = {each.module: split_module(model.get_submodule(each.module), each) for each in self.consumers}
        return gather_moments(model, parts, self.inputs, BATCH_SIZE, lambda done, total: None)[0]

    @property
    def consumers(self) -> list[Wiring]:
        return [wiring for wiring in self.structure.wirings if wiring.reads_units]

    def copy_model(self) -> nn.Module:
        """A copy that may be changed, with gradients."""
        return copy.deepcopy(self.model).eval().requires_grad_(True)

    def read_weight(self, wiring: Wiring) -> Tensor:
        """The weights as a matrix (outputs, columns)."""
        return self.model.get_submodule(wiring.module).get_parameter("weight").detach().double().flatten(1)


def list_methods(model: nn.Module) -> list[str]:
    """The methods applicable to the network."""
    normed = any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    return [name for name in METHODS if normed or name != "BN scale"]


def prefer(name: str, subject: Subject) -> Floats:
    """The importance of every unit by the method of that name."""
    return METHODS[name](subject)


def draw_random(subject: Subject, seed: int) -> Floats:
    return np.random.default_rng(seed).random(subject.structure.unit_count)


def by_weights(subject: Subject, build: Callable[[], Any]) -> Floats:
    return _ask(subject, subject.copy_model(), build())


def by_gradient(subject: Subject) -> Floats:
    """Taylor importance, with the gradient of the mean loss over all images."""
    model = subject.copy_model()
    for inputs, labels in _split(subject, BATCH_SIZE):
        loss = functional.cross_entropy(model(inputs), labels, reduction="sum") / len(subject.labels)
        loss.backward()
    return _ask(subject, model, tp.TaylorImportance())


def by_curvature(subject: Subject) -> Floats:
    """Hessian importance, from the mean of squared per-image gradients; Torch-Pruning's own sum (`accumulate_grad`)
    keeps only the last image."""
    model = subject.copy_model()
    parameters = list(model.parameters())
    totals = [torch.zeros_like(parameter) for parameter in parameters]
    for inputs, labels in _split(subject, 1):
        gradients = torch.autograd.grad(functional.cross_entropy(model(inputs), labels), parameters)
        for total, gradient in zip(totals, gradients, strict=True):
            total.addcmul_(gradient, gradient, value=1 / len(subject.labels))
    for parameter, total in zip(parameters, totals, strict=True):
        parameter.grad = total
    return _ask(subject, model, tp.HessianImportance())


def by_read_values(subject: Subject) -> Floats:
    """Activation importance. Torch-Pruning keeps only the last batch, so all images are run as one."""
    model, importance = subject.copy_model(), tp.ActivationImportance()
    with torch.no_grad(), importance.compute_importance(model):
        model(subject.inputs)
    return _ask(subject, model, importance)


def by_sensitivity(subject: Subject) -> Floats:
    """SNIP by unit: the summed sensitivity of incoming weights."""
    sensitivity = measure_sensitivity(subject.model, subject.inputs, subject.labels)
    values = np.zeros(subject.structure.unit_count)
    for layer in subject.structure.removable:
        np.add.at(values, layer.units, sensitivity[layer.name].flatten(1).sum(1).numpy())
    return _normalise(subject, values)


def by_activation(subject: Subject) -> Floats:
    """The mean activation of the unit as read by its consumers, over images and positions."""
    return _average(subject, lambda wiring, moments: _mean_of(moments))


def by_outgoing(subject: Subject, measure: Callable[[Sequence[Moments]], Floats]) -> Floats:
    """The mean or standard deviation of the unit as read by its consumers, times the L2 norm of their weights for
    it."""

    def weigh(wiring: Wiring, moments: Sequence[Moments]) -> Floats:
        squares = (subject.read_weight(wiring) ** 2).sum(0).numpy().reshape(len(wiring.inputs), -1)
        return measure(moments) * np.repeat(np.sqrt(squares.sum(1)), squares.shape[1])

    return _average(subject, weigh)


def by_elimination(subject: Subject) -> Floats:
    """Greedy backward elimination, layer-wise in the unpruned network: the error of the consumers' outputs when the
    unit is eliminated. All these outputs have equal weight; in `cn.search` they are weighted by the loss."""
    values = np.zeros(subject.structure.unit_count)
    for group in subject.structure.groups:
        found = eliminate(_list_consumers(subject, group), len(group), group.blocks)
        values[group.units[found.order.numpy()]] = found.errors.numpy()
    return _normalise(subject, values)


def by_single_removal(subject: Subject) -> Floats:
    """The same error with only this unit removed, the score of ModHiFi."""
    values = np.zeros(subject.structure.unit_count)
    for group in subject.structure.groups:
        consumers = _list_consumers(subject, group)
        alone = ~torch.eye(len(group), dtype=torch.bool)
        values[group.units] = [measure_error(consumers, stays) for stays in alone]
    return _normalise(subject, values)


def _list_consumers(subject: Subject, group: Group) -> list[Consumer]:
    numbers = np.full(subject.structure.unit_count + 1, -1)
    numbers[group.units] = np.arange(len(group))
    consumers = []
    for wiring in subject.consumers:
        if not np.isin(wiring.inputs, group.units).any():
            continue
        weight, columns = subject.read_weight(wiring), torch.from_numpy(numbers[_list_columns(subject, wiring)])
        first = 0
        for moments in subject.moments[wiring.module]:
            some = slice(first, first + len(moments.mean))
            free = (columns[some] >= 0).nonzero().flatten()
            inverse = invert(moments.covariance)[free[:, None], free]
            consumers.append(Consumer(inverse, weight[:, some].T[free], columns[some][free]))
            first = some.stop
    return consumers


def choose_correct(subject: Subject) -> list[int]:
    """One image per class, a correctly classified one if there is any."""
    correct = predict(subject.model, subject.inputs) == subject.labels
    order = torch.argsort(~correct, stable=True)
    return [int(order[subject.labels[order] == label][0]) for label in subject.labels.unique()]


def by_program(subject: Subject) -> Floats:
    """The scores of the paper's program on one image per class."""
    rows = choose_correct(subject)
    told = read_score_settings(subject.program, threads=None)
    scores = cn.score(subject.model, subject.inputs[rows], subject.labels[rows], **told)
    return _normalise(subject, scores.per_unit)


def _mean_of(moments: Sequence[Moments]) -> Floats:
    return torch.cat([each.mean for each in moments]).double().numpy()


def _deviation_of(moments: Sequence[Moments]) -> Floats:
    return torch.cat([each.covariance.diagonal() for each in moments]).double().clamp(min=0).sqrt().numpy()


METHODS: Mapping[str, Callable[[Subject], Floats]] = {
    "L1": partial(by_weights, build=partial(tp.MagnitudeImportance, p=1)),
    "L2": partial(by_weights, build=partial(tp.MagnitudeImportance, p=2)),
    "Taylor": by_gradient,
    "Hessian": by_curvature,
    "FPGM": partial(by_weights, build=tp.FPGMImportance),
    "LAMP": partial(by_weights, build=tp.LAMPImportance),
    "BN scale": partial(by_weights, build=tp.BNScaleImportance),
    "activation": by_read_values,
    "SNIP by unit": by_sensitivity,
    "mean activation": by_activation,
    "mean x outgoing norm": partial(by_outgoing, measure=_mean_of),
    "deviation x outgoing norm": partial(by_outgoing, measure=_deviation_of),
    "single removal": by_single_removal,
    "greedy elimination": by_elimination,
    "paper's program": by_program,
}
"""The first eight are Torch-Pruning's, with its default settings."""


def _ask(subject: Subject, model: nn.Module, importance: Any) -> Floats:
    """Importances by Torch-Pruning, for the groups of its own dependency graph; the L1 norm for groups without a
    result (BN scale without a batch norm)."""
    graph = torch_pruning.DependencyGraph().build_dependency(model, example_inputs=subject.inputs[:2])
    units = {model.get_submodule(layer.name): layer.units for layer in subject.structure.removable}
    values = np.full(subject.structure.unit_count, np.nan)
    for group in graph.get_all_groups(root_module_types=(nn.Conv2d, nn.Linear)):
        if not any(
            item.dep.target.module in units for item in group if graph.is_out_channel_pruning_fn(item.dep.handler)
        ):
            continue
        found = importance(group)
        found = tp.MagnitudeImportance(p=1)(group) if found is None else found
        for item in group:
            module = item.dep.target.module
            if module in units and graph.is_out_channel_pruning_fn(item.dep.handler):
                values[units[module][item.idxs]] = torch.nan_to_num(found)[item.root_idxs].numpy()
    assert np.isfinite(values).all(), "Torch-Pruning has no importance for some unit"
    return values


def _average(subject: Subject, measure: Callable[[Wiring, Sequence[Moments]], Floats]) -> Floats:
    """Average `measure`, a value per column, over the columns of all consumers of a unit."""
    totals, counts = np.zeros(subject.structure.unit_count + 1), np.zeros(subject.structure.unit_count + 1)
    for wiring in subject.consumers:
        columns = _list_columns(subject, wiring)
        np.add.at(totals, columns, measure(wiring, subject.moments[wiring.module]))
        np.add.at(counts, columns, 1)
    return _normalise(subject, (totals / np.maximum(counts, 1))[:-1])  # the last entry collects NO_UNIT


def _list_columns(subject: Subject, wiring: Wiring) -> Ints:
    """The unit of every column of the module's weight matrix."""
    return np.repeat(wiring.inputs, subject.read_weight(wiring).shape[1] // len(wiring.inputs))


def _normalise(subject: Subject, values: Floats) -> Floats:
    shares = values.copy()
    for group in subject.structure.groups:
        mean = values[group.units].mean()
        if mean > 0:
            shares[group.units] /= mean
    return shares


def _split(subject: Subject, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(subject.inputs, size), torch.split(subject.labels, size), strict=True)
