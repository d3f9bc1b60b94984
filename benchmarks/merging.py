"""Merging: removed units are merged into others of their layer, without least squares.

Both methods return a copy of full size, in which the outgoing weights of removed units have been added to those of
kept units; removing them afterwards changes nothing. Batch norms should then be re-estimated on calibration images.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor, nn

import critical_neurons as cn
from critical_neurons.core.scores import spread_scores
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.selection.norms import score_norms
from preferring import Subject

STARTS = 3
"""Restarts of k-means."""

BIAS_SHARE = 0.15
"""Weight of the bias difference in the distance between two units, in Neuron Merging."""

LEAST_SIMILAR = 0.1
"""The cosine below which Neuron Merging removes a unit without merging it."""


@dataclass(frozen=True)
class Incoming:
    """Weights (units, columns) and biases (units, layers) of a group's units, batch norms folded in."""

    weight: Floats
    bias: Floats


def fold(subject: Subject, plan: cn.Plan, seed: int) -> tuple[nn.Module, cn.Plan]:
    """Model folding (Wang et al. 2025): k-means on the units of a layer, with as many clusters as the plan keeps
    units. A cluster becomes one unit with the mean incoming and the sum of the outgoing weights of its members."""
    from sklearn.cluster import KMeans  # its import takes more than a second

    model, stays = subject.copy_model().requires_grad_(False), np.zeros(subject.structure.unit_count)
    for units, kept, incoming in _list_groups(subject, plan):
        found = KMeans(len(kept), n_init=STARTS, random_state=seed).fit(incoming.weight)
        distance = found.transform(incoming.weight)
        for cluster in range(len(kept)):
            members = np.flatnonzero(found.labels_ == cluster)
            chief = members[distance[members, cluster].argmin()]
            stays[units[chief]] = 1
            _average(model, subject, units[members])
            for member in members[members != chief]:
                _hand_over(model, subject, units[member], units[chief], 1.0)
    return model, keep_units(subject, stays)


def merge(subject: Subject, plan: cn.Plan, seed: int) -> tuple[nn.Module, cn.Plan]:
    """Neuron Merging (Kim et al. 2020): a removed unit is replaced by the kept one with the most similar weights and
    bias, scaled by the ratio of their norms."""
    model = subject.copy_model().requires_grad_(False)
    for units, kept, incoming in _list_groups(subject, plan):
        norm = np.linalg.norm(incoming.weight, axis=1).clip(1e-12)
        cosine = incoming.weight @ incoming.weight.T / np.outer(norm, norm)
        scale = norm[:, None] / norm
        offset = np.abs(incoming.bias[:, None] - scale[:, :, None] * incoming.bias).sum(2)
        offset /= offset.max(1, keepdims=True).clip(1e-12)
        distance = (1 - BIAS_SHARE) * (1 - cosine) + BIAS_SHARE * offset
        places = np.flatnonzero(np.isin(units, kept))
        for gone in np.flatnonzero(~np.isin(units, kept)):
            heir = places[distance[gone, places].argmin()]
            if cosine[gone, heir] >= LEAST_SIMILAR:
                _hand_over(model, subject, units[gone], units[heir], scale[gone, heir])
    return model, plan


MERGERS: Mapping[str, Callable[[Subject, cn.Plan, int], tuple[nn.Module, cn.Plan]]] = {
    "model folding": fold,
    "Neuron Merging": merge,
}


def _list_groups(subject: Subject, plan: cn.Plan) -> Iterator[tuple[Ints, Ints, Incoming]]:
    """For every group its units, those that the plan keeps, and the incoming weights of all."""
    stays = np.zeros(subject.structure.unit_count + 1, dtype=bool)
    for layer in subject.structure.removable:
        stays[layer.units[list(plan.kept[layer.name])]] = True
    for group in subject.structure.groups:
        yield group.units, group.units[stays[group.units]], _describe(subject, group.units)


def _describe(subject: Subject, units: Ints) -> Incoming:
    """The incoming weights of these units in all their layers, each with the following batch norm folded in."""
    weights: list[Floats] = []
    biases: list[Floats] = []
    for wiring in subject.structure.wirings:
        if not np.isin(wiring.outputs, units).any():
            continue
        module = subject.model.get_submodule(wiring.module)
        rows = _find(wiring.outputs, units)
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            gain = module.weight / (module.running_var + module.eps).sqrt()
            shift = (module.bias - module.running_mean * gain).detach().double().numpy()[rows]
            gains = gain.detach().double().numpy()[rows]
            weights[-1] = weights[-1] * gains[:, None]
            biases[-1] = biases[-1] * gains + shift
        else:
            weights.append(module.get_parameter("weight").detach().double().flatten(1).numpy()[rows])
            bias = np.zeros(len(wiring.outputs)) if module.bias is None else module.bias.detach().double().numpy()
            biases.append(bias[rows])
    return Incoming(np.concatenate(weights, axis=1), np.stack(biases, axis=1))


def _find(places: Ints, units: Ints) -> Ints:
    """The position of each unit in `places`."""
    return np.array([np.flatnonzero(places == unit)[0] for unit in units])


def _average(model: nn.Module, subject: Subject, members: Ints) -> None:
    """Give all members the mean of their weights, biases and batch norms."""
    for tensor, places in _list_slices(model, subject, 0):
        rows = [each for unit in members for each in np.flatnonzero(places == unit)]
        if rows:
            tensor[rows] = tensor[rows].mean(0, keepdim=True)


def _hand_over(model: nn.Module, subject: Subject, gone: int, heir: int, scale: float) -> None:
    """Add the scaled outgoing weights of the removed unit to those of the heir."""
    for tensor, places in _list_slices(model, subject, 1):
        sources, targets = np.flatnonzero(places == gone), np.flatnonzero(places == heir)
        if len(sources):
            tensor[:, targets] += scale * tensor[:, sources]
            tensor[:, sources] = 0


def _list_slices(model: nn.Module, subject: Subject, axis: int) -> Iterator[tuple[Tensor, Ints]]:
    """The tensors with units along this axis, and those units."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for each in subject.structure.slices:
        if each.axis == axis and each.units.ndim == 1:
            yield tensors[each.tensor], each.units


def keep_units(subject: Subject, stays: Floats) -> cn.Plan:
    """The plan that keeps the units marked by 1."""
    frame = score_norms(subject.model, subject.structure)
    values = spread_scores(frame.structure, stays)
    return cn.plan(replace(frame, values_by_layer=values, settings={"method": "merging"}), threshold=0.5)
