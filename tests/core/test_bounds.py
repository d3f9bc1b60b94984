"""Bounds of one's own: tried before they are used."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import critical_neurons as cn
from critical_neurons.core.network import MaxPool, Relu
from critical_neurons.errors import InvalidSettingError
from tests.settings import settle
from tests.zoo import ZOO, share_case

SAME = 1e-5
QUICK = {"gap": 1e-6, "threads": 1}


def first_relu(network):
    return next((index, op) for index, op in enumerate(network.ops) if isinstance(op, Relu))


def last_relu(network):
    return [(index, op) for index, op in enumerate(network.ops) if isinstance(op, Relu)][-1]


def change(bounds, index, lower=None, upper=None):
    """The same bounds with other ends at one ReLU."""
    old = bounds.before_relu[index]
    interval = cn.Interval(old.lower if lower is None else lower, old.upper if upper is None else upper)
    return replace(bounds, before_relu={**bounds.before_relu, index: interval})


@pytest.mark.parametrize("settings", [{}, {"radius": 0.1}, {"pruned": True}], ids=["points", "boxes", "pruned"])
@pytest.mark.parametrize("name", ZOO)
def test_bounds_of_the_library_pass(name, settings):
    case = share_case(name)
    cn.bound_network(case.network, case.inputs, **settings).check(case.network)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, {"radius": 0.0}),
        ({"input_radius": 0.05}, {"radius": 0.05}),
        ({"formulation": "exact", "binary": True}, {"pruned": True}),
        ({"by_class": True}, {"radius": 0.0}),
    ],
)
def test_bounds_given_are_the_bounds_used(settings, steps):
    case = share_case("mlp without biases")
    own = cn.bound_network(case.network, case.inputs, **steps)
    given = cn.score(case.model, case.inputs, case.labels, **settle(bounds=own, **settings, **QUICK))
    made = cn.score(case.model, case.inputs, case.labels, **settle(**settings, **QUICK))
    assert given.objective == pytest.approx(made.objective, abs=SAME)
    assert (given.settings["bounds_from"], made.settings["bounds_from"]) == ("user", "program")
    assert given.settings["formulation"] == made.settings["formulation"]


def test_wider_bounds_of_the_exact_program_leave_its_optimum():
    """Even at the first layer, where the pre-activation is known and the interval says less."""
    case = share_case("mlp without biases")
    own = cn.bound_network(case.network, case.inputs, pruned=True)
    wider = {
        index: cn.Interval(interval.lower - 0.3, interval.upper + 0.5) for index, interval in own.before_relu.items()
    }
    settings = {"formulation": "exact", "binary": True, **QUICK}
    loose = cn.score(
        case.model, case.inputs, case.labels, **settle(bounds=replace(own, before_relu=wider), **settings)
    )
    tight = cn.score(case.model, case.inputs, case.labels, **settle(bounds="backward", **settings))
    assert loose.objective == pytest.approx(tight.objective, abs=SAME)
    assert loose.sizes["gates"] > tight.sizes["gates"]


def test_wider_bounds_of_the_paper_program_change_it():
    case = share_case("mlp")
    own = cn.bound_network(case.network, case.inputs)
    wider = {index: cn.Interval(each.lower - 0.2, each.upper + 0.2) for index, each in own.before_relu.items()}
    program = cn.encode(case.network, replace(own, before_relu=wider), case.labels)
    assert program.gate_count > cn.encode(case.network, own, case.labels).gate_count


def refuse(bounds, message, case, **settings):
    with pytest.raises(InvalidSettingError) as caught:
        cn.score(case.model, case.inputs, case.labels, **settle(bounds=bounds, **settings, **QUICK))
    assert message in str(caught.value)


def test_a_value_outside_is_named():
    case = share_case("mlp")
    index, op = last_relu(case.network)
    own = cn.bound_network(case.network, case.inputs, radius=0.1)
    value = case.network.evaluate(case.inputs)[op.source][2, 3]
    upper = own.before_relu[index].upper.copy()
    upper[2, 3] = value - 1e-3
    message = f"bounds: {op.name}, data point 2, element (3,): the network has {value:.9g}, outside ["
    lowered = change(own, index, np.minimum(own.before_relu[index].lower, upper), upper)
    refuse(lowered, message, case, input_radius=0.1)
    with pytest.raises(InvalidSettingError, match="data point 2, element"):
        cn.encode(case.network, lowered, case.labels)


def test_bounds_of_the_unpruned_network_do_not_hold_with_units_removed():
    case = share_case("mlp")
    unpruned = cn.bound_network(case.network, case.inputs)
    refuse(replace(unpruned, pruned=True), "all units removed, element", case, formulation="exact")


def test_bounds_that_hold_with_all_units_and_with_none_but_not_in_between():
    case = share_case("mlp without biases")
    whole = cn.bound_network(case.network, case.inputs)
    index, _ = first_relu(case.network)
    hull = {
        at: each if at == index else cn.Interval(np.minimum(each.lower, 0), np.maximum(each.upper, 0))
        for at, each in whole.before_relu.items()
    }
    refuse(replace(whole, before_relu=hull, pruned=True), "removed, element", case, formulation="exact")


def test_bounds_of_the_points_do_not_hold_in_the_boxes():
    case = share_case("mlp")
    points = replace(cn.bound_network(case.network, case.inputs), radius=0.3)
    refuse(points, "a corner of its box", case, input_radius=0.3)


def test_bounds_for_something_else():
    case = share_case("mlp")
    own = cn.bound_network(case.network, case.inputs)
    refuse(own, "found radius=0.0, pruned=False. Accepted", case, input_radius=0.1)
    refuse(own, "radius=0.0, pruned=True", case, formulation="exact")
    refuse(cn.bound_network(case.network, case.inputs[::-1]), "made for other inputs", case)
    refuse(
        replace(own, before_relu={}),
        "before_relu has intervals for the ops []. Accepted: one for each of 2 (1)",
        case,
    )
    index, op = first_relu(case.network)
    short = own.before_relu[index].lower[:1]
    refuse(change(own, index, short, short), f"op {index} ({op.name}): found shape (1, 5). Accepted: (3, 5)", case)
    endless = np.full((3, 5), np.inf)
    refuse(change(own, index, -endless, endless), "NaN or infinite", case)


def test_max_pools_need_intervals_too():
    case = share_case("vgg")
    own = cn.bound_network(case.network, case.inputs)
    pools = [op.name for op in case.network.ops if isinstance(op, MaxPool)]
    with pytest.raises(InvalidSettingError, match=rf"before_pool.*\({pools[0]}\)"):
        cn.encode(case.network, replace(own, before_pool={}), case.labels)


def test_ends_the_wrong_way_round():
    with pytest.raises(InvalidSettingError, match="lower end above its upper end"):
        cn.Interval(np.ones(3), np.zeros(3))
    with pytest.raises(InvalidSettingError, match="or NaN"):
        cn.Interval(np.zeros(3), np.full(3, np.nan))


def test_the_linearised_program_takes_points():
    case = share_case("mlp")
    own = cn.bound_network(case.network, case.inputs)
    index, _ = first_relu(case.network)
    wide = change(own, index, own.before_relu[index].lower - 1.0)
    with pytest.raises(InvalidSettingError, match="'linearised' takes points"):
        cn.encode(case.network, wide, case.labels, formulation="linearised")
