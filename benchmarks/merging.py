"""Merging: units that go are taken over by others of their layer, without least squares.

Both ways work on a copy in full size. What reads the units that stay takes over the weights of those that go, so that
removing these afterwards changes nothing. Batch norms are to be re-estimated on calibration images then.
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
"""Of k-means."""

BIAS_SHARE = 0.15
"""Of the distance between two units that is the difference of their biases, in Neuron Merging."""

LEAST_SIMILAR = 0.1
"""The cosine below which Neuron Merging removes a unit without merging it."""


@dataclass(frozen=True)
class Incoming:
    """Weights (units, columns) and biases (units, layers) of a group's units, batch norms folded in."""

    weight: Floats
    bias: Floats


def fold(subject: Subject, plan: cn.Plan, seed: int) -> tuple[nn.Module, cn.Plan]:
    """Model folding (Wang et al. 2025): k-means makes as many clusters of a layer's units as the plan keeps units. A
    cluster becomes one unit with the mean of its members' weights; what reads it has the sum of theirs."""
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
    """Neuron Merging (Kim et al. 2020): a unit that the plan removes is replaced by the one that stays with the most
    similar weights and bias, scaled as their norms are."""
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
    """The units of every group, those that the plan keeps, and what all of them compute."""
    stays = np.zeros(subject.structure.unit_count + 1, dtype=bool)
    for layer in subject.structure.removable:
        stays[layer.units[list(plan.kept[layer.name])]] = True
    for group in subject.structure.groups:
        yield group.units, group.units[stays[group.units]], _describe(subject, group.units)


def _describe(subject: Subject, units: Ints) -> Incoming:
    """Of all layers that write these units, each with the batch norm that comes after it."""
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
    """Where each unit stands."""
    return np.array([np.flatnonzero(places == unit)[0] for unit in units])


def _average(model: nn.Module, subject: Subject, members: Ints) -> None:
    """Give all members the mean of their weights, biases and batch norms."""
    for tensor, places in _list_slices(model, subject, 0):
        rows = [each for unit in members for each in np.flatnonzero(places == unit)]
        if rows:
            tensor[rows] = tensor[rows].mean(0, keepdim=True)


def _hand_over(model: nn.Module, subject: Subject, gone: int, heir: int, scale: float) -> None:
    """What reads the unit that goes reads the heir instead, scaled."""
    for tensor, places in _list_slices(model, subject, 1):
        sources, targets = np.flatnonzero(places == gone), np.flatnonzero(places == heir)
        if len(sources):
            tensor[:, targets] += scale * tensor[:, sources]
            tensor[:, sources] = 0


def _list_slices(model: nn.Module, subject: Subject, axis: int) -> Iterator[tuple[Tensor, Ints]]:
    """The tensors that have units along an axis."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for each in subject.structure.slices:
        if each.axis == axis and each.units.ndim == 1:
            yield tensors[each.tensor], each.units


def keep_units(subject: Subject, stays: Floats) -> cn.Plan:
    """The plan that keeps the units with a 1."""
    frame = score_norms(subject.model, subject.structure)
    values = spread_scores(frame.structure, stays)
    return cn.plan(replace(frame, values_by_layer=values, settings={"method": "merging"}), threshold=0.5)
