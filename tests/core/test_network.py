"""Network: layers, holds and wirings survive being written as JSON."""

from __future__ import annotations

import json

import numpy as np
import pytest

from critical_neurons.core.network import Hold, Layer, Wiring
from tests.zoo import ZOO, share_case


def assert_equal(left, right):
    """Field by field, arrays with their types and to the last bit."""
    assert vars(left).keys() == vars(right).keys()
    for key, value in vars(left).items():
        other = getattr(right, key)
        assert type(value) is type(other)
        if isinstance(value, np.ndarray):
            assert value.dtype == other.dtype
            assert value.tobytes() == other.tobytes()
        else:
            assert value == other


@pytest.mark.parametrize("name", ZOO)
def test_nouns_survive_json(name):
    network = share_case(name).network
    for kind, nouns in ((Layer, network.layers), (Hold, network.holds), (Wiring, network.wirings)):
        for noun in nouns:
            assert_equal(kind.from_dict(json.loads(json.dumps(noun.to_dict()))), noun)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Layer, {"name": "a", "kind": "Linear", "units": [0, 1], "reason": "", "blocks": 2}),
        (Hold, {"module": "a", "units": [0, -1]}),
        (
            Wiring,
            {
                "module": "a",
                "inputs": [-1],
                "outputs": [0, 1],
                "shifted": [True],
                "constants": [0.1],
                "kernel": 9,
                "positions": 4,
                "groups": 1,
                "extras": 1,
            },
        ),
    ],
)
def test_the_format(kind, data):
    """What files hold: a change here needs a new format version."""
    assert kind.from_dict(data).to_dict() == data
    for key in ("name", "units", "module", "inputs"):
        if key in data:
            with pytest.raises((KeyError, TypeError)):
                kind.from_dict({other: value for other, value in data.items() if other != key})
