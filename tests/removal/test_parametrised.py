"""Weights that are computed from others: sliced through those, and the same as a model with plain weights."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import parametrizations, prune

import critical_neurons as cn
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.parametrised import make_plain
from critical_neurons.removal.refit.behind import refit_behind
from critical_neurons.removal.remove import remove_units, zero_units
from critical_neurons.removal.same_outputs import run_evenly
from critical_neurons.structure import find_structure
from tests.structure.checks import assert_alike, draw_stays

INPUTS = torch.linspace(-1, 1, 8 * 2 * 6 * 6, dtype=torch.float64).sin().reshape(8, 2, 6, 6)


def mask_half(module):
    return prune.random_unstructured(module, "weight", 0.5)


WAYS = {
    "weight norm": parametrizations.weight_norm,
    "weight norm of inputs": lambda module: parametrizations.weight_norm(module, dim=1),
    "weight norm of all": lambda module: parametrizations.weight_norm(module, dim=None),
    "spectral norm": parametrizations.spectral_norm,
    "weight norm by hooks": utils.weight_norm,
    "spectral norm by hooks": utils.spectral_norm,
    "mask": mask_half,
}

SHARED_BY_GROUPS = {"weight norm of inputs", "spectral norm", "spectral norm by hooks"}
"""One norm or vector for the inputs of both groups of a convolution: these go together."""


def build(way):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # hooks are the old way
        parametrise = WAYS[way]
        model = nn.Sequential(
            *(parametrise(nn.Conv2d(2, 4, 3)), nn.Sigmoid(), parametrise(nn.Conv2d(4, 4, 3, groups=2)), nn.ReLU()),
            *(parametrise(nn.ConvTranspose2d(4, 3, 3)), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            *(parametrise(nn.Linear(3, 5)), nn.ReLU(), nn.Linear(5, 2)),
        )
    model = model.double()
    model(INPUTS).sum().backward()  # as after training: results with a history are kept by hooks
    return model.eval()


@pytest.mark.parametrize("way", WAYS)
def test_smaller_as_masked_as_with_plain_weights(way):
    model = build(way)
    plain = make_plain(copy_whole(model.requires_grad_(False).eval()))
    assert not any("parametrizations" in name or "weight_" in name for name in plain.state_dict())
    assert_alike(run_evenly(plain, INPUTS), run_evenly(model, INPUTS))
    structure = find_structure(model, INPUTS)
    assert [layer.kind for layer in structure.removable] == ["Conv2d", "Conv2d", "ConvTranspose2d", "Linear"]
    assert structure.unit_count == (14 if way in SHARED_BY_GROUPS else 16)
    same = find_structure(plain, INPUTS)
    before = {name: values.clone() for name, values in model.state_dict().items()}
    for seed in range(4):
        stays = draw_stays(structure, seed)
        smaller = remove_units(model, structure, stays)
        found = run_evenly(smaller, INPUTS)
        assert_alike(run_evenly(zero_units(model, structure, stays), INPUTS), found)
        likewise = np.ones(same.unit_count + 1, dtype=bool)
        for one, other in zip(structure.layers, same.layers, strict=True):
            likewise[other.units] = stays[one.units]
        assert_alike(run_evenly(remove_units(plain, same, likewise), INPUTS), found)
        assert smaller[0].out_channels == int(stays[structure.layers[0].units].sum())
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())


@pytest.mark.parametrize("way", ["weight norm", "weight norm by hooks"])
def test_refits_the_weights_they_make(way):
    """As of plain weights; the norms are there afterwards, and so are their names."""
    model = build(way).requires_grad_(False)
    plain = make_plain(copy_whole(model))
    structure = find_structure(model, INPUTS)
    stays = draw_stays(structure, 1)
    smaller = remove_units(model, structure, stays)
    found = refit_behind(model, smaller, structure, stays, INPUTS, "least_squares")
    same = find_structure(plain, INPUTS)
    wanted = refit_behind(plain, remove_units(plain, same, stays), same, stays, INPUTS, "least_squares")
    assert_alike(run_evenly(wanted, INPUTS), run_evenly(found, INPUTS))
    assert list(found.state_dict()) == list(model.state_dict())


def test_searches_saves_and_loads(tmp_path):
    model = build("weight norm")
    found = cn.compress(model, INPUTS, macs=0.6, effort="quick", onnx=False)
    found.save(tmp_path / "smaller")
    loaded = cn.load(tmp_path / "smaller", lambda: build("weight norm"))
    assert_alike(run_evenly(found.model, INPUTS), run_evenly(loaded, INPUTS))
