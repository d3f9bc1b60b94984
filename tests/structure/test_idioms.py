"""One tiny network for every way of writing: what can be removed, together with what, and why the rest stays."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from critical_neurons.core.structure import NO_UNIT
from tests.structure.checks import inspect_twice, train_looks
from tests.structure.idioms import IDIOMS


@pytest.mark.parametrize("name", IDIOMS)
def test_idiom(name):
    idiom = IDIOMS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        structure = inspect_twice(train_looks(idiom.build()), idiom.inputs)
    layers = {layer.name: layer for layer in structure.layers}
    described = str(structure)
    assert structure.unit_count == idiom.units, described
    for layer, count in idiom.channels.items():
        assert int((layers[layer].units != NO_UNIT).sum()) == count, described
    for layer, part in idiom.reasons.items():
        assert part in layers[layer].reason, described
    for each in structure.layers:
        assert bool(each.reason) == bool(np.all(each.units == NO_UNIT)), described
