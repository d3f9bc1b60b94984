"""Fold: move the contribution of units that can be removed without loss into the layers that read them.

A unit whose ReLU is always active is an affine function of its layer's input. If its weights are a linear combination
of those of other such units, h_j = sum_i c_i h_i + k, its readers get the weights W_i + c_i W_j and the bias
b + k W_j. A unit whose weights and bias are a positive multiple of another's is merged in the same way, with a single
i and k = 0, whatever its ReLU does. Between two linear layers the always-active units are reduced to the rank of what
the second computes from them (factor.py). If all ReLUs of a layer are always active, it and its reader become one
layer (collapse.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.bounds import Interval
from critical_neurons.core.network import Network
from critical_neurons.core.stability import LayerChange, State
from critical_neurons.core.structure import Bools, Floats, Ints, Slice, Structure
from critical_neurons.removal.collapse import collapse_link, read_affine
from critical_neurons.removal.factor import choose_basis, factor
from critical_neurons.removal.links import SAME, Link, Reader, find_links

FITTED = 1e-10
"""Largest relative residual of a row that counts as a combination of others."""


class Folding:
    """Changes `model`, which is in float64, in place. Afterwards `stays` (units + 1) marks the remaining units, and
    `structure` includes new biases. `ranges` holds the range of every layer's input, by the layer's name.
    """

    def __init__(
        self, model: nn.Module, network: Network, states: Sequence[State], ranges: Mapping[str, Interval]
    ) -> None:
        self._model, self._states, self._ranges = model, states, dict(ranges)
        self.structure = network.structure
        self._links = find_links(model, network)
        self.stays: Bools = np.array([state is not State.OFF for state in states] + [True])
        self._changes = {layer.name: LayerChange(layer.name, layer.size) for layer in self.structure.removable}
        _keep_least(self.structure, self.stays)
        self._silence()
        for layer in self.structure.removable:
            off = int((~self.stays[layer.units]).sum())
            self._changes[layer.name] = replace(self._changes[layer.name], off=off)
            link = self._links[layer.name]
            if isinstance(link, Link):
                self._merge(link)
        for layer in reversed(self.structure.removable):
            link = self._links[layer.name]
            if isinstance(link, Link):
                self._drop_unread(link)

    @property
    def changes(self) -> tuple[LayerChange, ...]:
        return tuple(self._changes.values())

    def collapse(self, smaller: nn.Module) -> None:
        """In the model without the removed units, merge layers whose ReLUs are all active into their readers."""
        for layer in self.structure.removable:
            kept = layer.units[self.stays[layer.units]]
            if (kept < 0).any() or not all(self._states[unit] is State.ON for unit in kept):
                continue
            link = self._links[layer.name]
            obstacle = link if isinstance(link, str) else collapse_link(smaller, link)
            note = f"all on, but {obstacle}" if obstacle else "all on: it collapsed into the next layer"
            self._changes[layer.name] = replace(self._changes[layer.name], collapsed=not obstacle, note=note)

    def _silence(self) -> None:
        """Zero the weights of inactive units that stay because their layer needs one, so that their inputs can go."""
        for name, link in self._links.items():
            if isinstance(link, str):
                continue
            channels = np.flatnonzero([self.stays[u] and u >= 0 and self._states[u] is State.OFF for u in link.units])
            if len(channels) and link.norm is None:
                with torch.no_grad():
                    for values in self._model.get_submodule(link.maker).parameters():
                        values[channels] = 0.0
                note = "all off: what reads it is constant"
                self._changes[name] = replace(self._changes[name], note=note)

    def _merge(self, link: Link) -> None:
        rows, offsets = self._effective_rows(link)
        channels = self._list_channels(link)
        on = np.array([c for c in channels if self._states[link.units[c]] is State.ON], dtype=np.int64)
        merged = 0
        if len(on) and all(reader.linear for reader in link.readers):
            merged += self._merge_combinations(link, rows, offsets, on)
            merged += self._factor(link, rows, offsets, on[self.stays[link.units[on]]])
        merged += self._merge_multiples(link, rows, offsets)
        self._changes[link.maker] = replace(self._changes[link.maker], merged=merged)

    def _merge_combinations(self, link: Link, rows: Floats, offsets: Floats, on: Ints) -> int:
        basis, others = choose_basis(rows[on])
        if not len(others):
            return 0
        own, gone = on[basis], on[others]
        shares = np.linalg.lstsq(rows[own].T, rows[gone].T, rcond=None)[0].T
        constants = offsets[gone] - shares @ offsets[own]
        error = np.abs(rows[gone] - shares @ rows[own]).max(axis=1, initial=0.0)
        scale = np.abs(rows[on]).max(initial=0.0)
        count = 0
        for place, channel in enumerate(gone.tolist()):
            exact = error[place] <= FITTED * scale
            if exact and self._can_take(link, constants[place]) and self._can_spare(link):
                self._hand_over(link, channel, own, shares[place], float(constants[place]))
                count += 1
        return count

    def _factor(self, link: Link, rows: Floats, offsets: Floats, on: Ints) -> int:
        behind = link.readers[0].name
        maker, reader = self._model.get_submodule(link.maker), self._model.get_submodule(behind)
        if not (link.plain and link.norm is None and isinstance(maker, nn.Linear) and isinstance(reader, nn.Linear)):
            return 0
        outputs = next(layer.units for layer in self.structure.layers if layer.name == behind)
        left = np.flatnonzero(self.stays[outputs])
        weight = reader.weight.detach().numpy().copy()
        found = factor(weight[np.ix_(left, on)], rows[on], offsets[on], self._ranges[link.maker])
        if found is None or not len(found.shift):
            return 0
        slots, gone = on[: len(found.shift)], on[len(found.shift) :]
        weight[:, on] = 0.0
        weight[np.ix_(left, slots)] = found.reading
        reader.weight = _like(reader.weight, torch.from_numpy(weight))
        with torch.no_grad():
            self._give_bias(behind)[left] += torch.from_numpy(found.constant)
            maker.weight[slots] = torch.from_numpy(found.weight)
            self._give_bias(link.maker)[slots] = torch.from_numpy(found.shift)
        rows[slots], offsets[slots] = found.weight, found.shift
        lower, upper = (end.copy() for end in (self._ranges[behind].lower, self._ranges[behind].upper))
        lower[slots], upper[slots] = found.reach.lower, found.reach.upper
        self._ranges[behind] = Interval(lower, upper)
        self.stays[link.units[gone]] = False
        return len(gone)

    def _merge_multiples(self, link: Link, rows: Floats, offsets: Floats) -> int:
        channels = self._list_channels(link)
        whole = np.column_stack([rows[channels], offsets[channels]])
        norms = np.linalg.norm(whole, axis=1)
        channels, whole, norms = channels[norms > 0], whole[norms > 0], norms[norms > 0]
        directions = whole / norms[:, None]
        weights = np.random.default_rng(0).uniform(-1.0, 1.0, whole.shape[1])
        marks, apart = directions @ weights, SAME * np.abs(weights).sum()
        count = 0
        gone = np.zeros(len(channels), dtype=bool)
        for first in range(len(channels)):
            if gone[first]:
                continue
            near = np.abs(marks[first + 1 :] - marks[first]) <= apart  # hardly any, and all that may be the same
            for second in first + 1 + np.flatnonzero(near & ~gone[first + 1 :]):
                if np.abs(directions[second] - directions[first]).max() > SAME:
                    continue
                share = np.array([norms[second] / norms[first]])
                self._hand_over(link, int(channels[second]), channels[[first]], share, 0.0)
                gone[second] = True
                count += 1
        return count

    def _can_take(self, link: Link, constant: float) -> bool:
        """Whether the readers can absorb a constant: with zero padding they cannot."""
        return constant == 0 or all(_takes_constants(self._model, reader) for reader in link.readers)

    def _can_spare(self, link: Link) -> bool:
        return len(self._list_channels(link)) > 1

    def _list_channels(self, link: Link) -> Ints:
        """The channels of units that stay."""
        return np.flatnonzero(self.stays[link.units] & (link.units >= 0))

    def _hand_over(self, link: Link, channel: int, others: Ints, shares: Floats, constant: float) -> None:
        """Remove a channel that equals shares · h[others] + constant, and adjust its readers."""
        for reader in link.readers:
            module = self._model.get_submodule(reader.name)
            weight = module.get_parameter("weight").detach().clone()
            by_channel = weight.reshape(len(weight), len(link.units), -1)
            given = by_channel[:, channel].clone()
            by_channel[:, others] += torch.from_numpy(shares).reshape(1, -1, 1) * given[:, None]
            by_channel[:, channel] = 0.0
            module.weight = _like(module.get_parameter("weight"), weight)
            if constant:
                ones = torch.from_numpy(np.broadcast_to(reader.ones, given.shape[1:]).copy())
                bias = self._give_bias(reader.name)
                module.bias = _like(bias, bias.detach() + constant * (given @ ones))
        self.stays[link.units[channel]] = False

    def _give_bias(self, name: str) -> nn.Parameter:
        """The bias of a layer, added as zeros if it had none."""
        module = self._model.get_submodule(name)
        if module.bias is None:
            weight = module.get_parameter("weight")
            module.bias = _like(weight, weight.new_zeros(len(weight)))
            units = next(layer.units for layer in self.structure.layers if layer.name == name)
            added = Slice(f"{name}.bias", 0, units)
            self.structure = replace(self.structure, slices=(*self.structure.slices, added))
        return module.get_parameter("bias")

    def _effective_rows(self, link: Link) -> tuple[Floats, Floats]:
        """Weights and bias of every pre-activation, with zeros for removed inputs."""
        weight, bias = read_affine(self._model, link)
        rows = weight.flatten(1).numpy().copy()
        for wiring in self.structure.wirings:
            if wiring.module == link.maker:
                rows *= np.repeat(self.stays[wiring.inputs], rows.shape[1] // len(wiring.inputs))
        return rows, bias.numpy().copy()

    def _drop_unread(self, link: Link) -> None:
        """Remove units that no remaining unit reads."""
        unread = np.ones(len(link.units), dtype=bool)
        for reader in link.readers:
            weight = self._model.get_submodule(reader.name).get_parameter("weight").detach()
            outputs = next((layer.units for layer in self.structure.layers if layer.name == reader.name), None)
            rows = weight if outputs is None else weight[torch.from_numpy(self.stays[outputs])]
            unread &= ~rows.reshape(len(rows), len(link.units), -1).ne(0).any(dim=2).any(dim=0).numpy()
        unread &= self.stays[link.units] & (link.units >= 0)
        for channel in np.flatnonzero(unread):
            if self._can_spare(link):
                self.stays[link.units[channel]] = False
                change = self._changes[link.maker]
                self._changes[link.maker] = replace(change, merged=change.merged + 1)


def _takes_constants(model: nn.Module, reader: Reader) -> bool:
    module = model.get_submodule(reader.name)
    if isinstance(module, nn.Linear):
        return True
    assert isinstance(module, nn.Conv1d | nn.Conv2d)
    return reader.ones.size == 1 and not isinstance(module.padding, str) and not any(module.padding)


def _like(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.to(old.dtype), requires_grad=old.requires_grad)


def _keep_least(structure: Structure, stays: Bools) -> None:
    """Keep equally many units in every block of a group, and at least one in every layer."""
    for group in structure.groups:
        blocks = group.units.reshape(group.blocks, -1)
        least = max(1, int(stays[blocks].sum(axis=1).max()))
        for units in blocks:
            missing = least - int(stays[units].sum())
            stays[units[~stays[units]][:missing]] = True
    for layer in structure.layers:
        if not stays[layer.units].any():
            stays[layer.units[0]] = True
