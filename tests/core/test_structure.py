"""Structure: its parts survive being written as JSON; restricted to some layers it keeps the units of the others."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from critical_neurons.core.costs import count_cost
from critical_neurons.core.documents import from_plain, pack, to_plain, unpack
from critical_neurons.core.structure import (
    NO_UNIT,
    OUTSIDE,
    Fingerprint,
    Group,
    Layer,
    Product,
    Slice,
    Structure,
    Wiring,
    choose_highest,
)
from tests.drawing import make_output, make_structure
from tests.zoo import ZOO, share_case


def assert_equal(left, right):
    """Field by field, arrays with their types and to the last bit."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        assert left.shape == right.shape
        assert left.tobytes() == right.tobytes()
    elif isinstance(left, tuple):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    elif isinstance(left, Structure | Layer | Slice | Wiring | Product | Fingerprint):
        fields = type(left).__dataclass_fields__
        for name in fields:
            assert_equal(getattr(left, name), getattr(right, name))
    else:
        assert left == right


@pytest.mark.parametrize("name", ZOO)
def test_structures_survive_json(name):
    structure = share_case(name).network.structure
    assert structure.slices
    assert structure.params
    assert structure.macs
    assert_equal(Structure.from_dict(json.loads(json.dumps(structure.to_dict()))), structure)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Layer, {"name": "a", "kind": "Linear", "units": [[0, 1, 2]], "reason": "", "blocks": 2}),
        (Slice, {"tensor": "a.weight", "axis": 1, "units": [[[0, 1, 2]], [[2, 1, 2]]]}),
        (
            Wiring,
            {
                "module": "a",
                "inputs": [[-1, 0, 1], [3, 0, 2]],
                "outputs": [[0, 1, 2]],
                "constants": [0.0, 0.1, 0.0],
                "kernel": 9,
                "positions": 4,
                "groups": 1,
                "biased": False,
                "alone": True,
            },
        ),
        (Product, {"module": "a", "amount": 18, "axes": [[[0, 1, 2]], [[-1, 0, 1], [3, 0, 2]]]}),
    ],
)
def test_the_format(kind, data):
    """What files hold: a change here needs a new format version."""
    assert to_plain(from_plain(kind, data)) == data
    for key in ("name", "units", "module", "inputs", "tensor", "axes"):
        if key in data:
            with pytest.raises(ValueError, match=f"missing required field `{key}`"):
                from_plain(kind, {other: value for other, value in data.items() if other != key})


@pytest.mark.parametrize(
    "units",
    [
        [],
        [0],
        [NO_UNIT],
        [NO_UNIT] * 5,
        [0, 1, 2, 3],
        [0, 0, 1, 1, 2, 2],
        [3, 2, 1, 0],
        [0, 2, 4],
        [NO_UNIT, 0, 1, NO_UNIT],
        [[0, 1], [2, 3]],
        [[NO_UNIT, 5], [5, NO_UNIT]],
    ],
)
def test_packed_units(units):
    units = np.array(units, dtype=np.int64)
    packed = json.loads(json.dumps(pack(units)))
    assert_equal(unpack(packed), units)


def test_long_runs_are_packed_short():
    assert pack(np.arange(1000)) == [[0, 1, 1000]]
    assert pack(np.full(1000, NO_UNIT)) == [[NO_UNIT, 0, 1000]]


CHAIN = make_structure(
    (
        Layer("a", "Conv2d", np.array([0, 1, 2])),
        Layer("b", "Conv2d", np.array([2, 1, NO_UNIT, 0])),
        Layer("c", "Linear", np.array([3, 4])),
        make_output(),
    ),
    (3, 2),
    (
        Wiring("a", np.full(1, NO_UNIT), np.arange(3), np.zeros(1)),
        Wiring("b", np.arange(3), np.array([2, 1, NO_UNIT, 0]), np.zeros(3)),
        Wiring("c", np.array([2, 1, NO_UNIT, 0]), np.array([3, 4]), np.zeros(4)),
    ),
)
CHAIN = replace(
    CHAIN,
    slices=(Slice("a.weight", 0, np.arange(3)), Slice("c.weight", 0, np.array([3, 4]))),
    params=(Product("a", 3, (np.arange(3),)), Product("c", 8, (np.array([3, 4]), np.array([2, 1, NO_UNIT, 0])))),
    macs=(Product("c", 8, (np.array([3, 4]), np.array([2, 1, NO_UNIT, 0]))),),
)


def test_groups_name_the_layers_that_share_units():
    assert [(group.layers, group.units.tolist(), group.blocks) for group in CHAIN.groups] == [
        (("a", "b"), [0, 1, 2], 1),
        (("c",), [3, 4], 1),
    ]
    assert [len(group) for group in CHAIN.groups] == [3, 2]
    assert [layer.name for layer in CHAIN.removable] == ["a", "b", "c"]


def test_of_equal_values_the_first_are_chosen_as_many_from_every_block():
    values = np.array([0.5, 0.5, 0.4, 0.1, 0.5, 0.2])
    assert choose_highest(values, 3).tolist() == [True, True, False, False, True, False]
    assert choose_highest(values, 4, blocks=2).tolist() == [True, True, False, False, True, True]
    assert Group(("a",), np.arange(6), 2).choose(values, 4).tolist() == [True, True, False, False, True, True]


def test_printing_says_what_can_go_and_why_not():
    lines = [line.split("  ")[-1].strip() for line in str(CHAIN).splitlines()]
    assert [line.partition("units")[2].strip() or line for line in lines] == [
        "yes, together with b",
        "yes, together with a; 1 of its channels must stay",
        "yes",
        "it gives the network's output",
    ]
    assert repr(CHAIN) == "Structure(4 layers, 5 units that can be removed)"


def test_restricting_leaves_layers_that_share_units_alone():
    found, number = CHAIN.restrict({"b": "it is wanted whole"})
    assert number.tolist() == [NO_UNIT, NO_UNIT, NO_UNIT, 0, 1, NO_UNIT]
    assert found.group_sizes == (2,)
    assert [layer.reason for layer in found.layers] == [
        "it shares its channels with b: it is wanted whole",
        "it is wanted whole",
        "",
        "it gives the network's output",
    ]
    assert found.layers[2].units.tolist() == [0, 1]
    assert found.slices[1].units.tolist() == [0, 1]
    assert found.wirings[2].inputs.tolist() == [NO_UNIT] * 4
    found.check()
    everything = np.ones(CHAIN.unit_count + 1)
    for measure in ("params", "macs"):
        assert count_cost(found, np.ones(3), measure) == count_cost(CHAIN, everything, measure)


def test_within_some_modules():
    found = CHAIN.within({"c"})
    assert [layer.name for layer in found.layers] == ["c"]
    assert [wiring.module for wiring in found.wirings] == ["c"]
    assert found.group_sizes == (2,)
    assert count_cost(found, np.ones(3), "params") == 8
    shared = CHAIN.within({"a", "c"})
    assert shared.layers[0].reason == f"it shares its channels with b: {OUTSIDE}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_sizes": (3, 0)}, "Expected `int` >= 1"),
        ({"group_sizes": (3, 3)}, "a unit of no layer"),
        ({"group_sizes": (3,)}, "a unit outside 0 to 2"),
        ({"slices": (Slice("a.weight", 0, np.array([-2])),)}, "a unit outside"),
        ({"params": (Product("a", 1, (np.array([5]),)),)}, "a unit outside"),
    ],
)
def test_structures_that_contradict_themselves_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Structure.from_dict(replace(CHAIN, **change).to_dict())
