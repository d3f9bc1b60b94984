"""Torch's default device is the user's: under another, here "meta", whose tensors are empty, results are the same."""

import numpy as np
import pytest
import torch

import critical_neurons as cn
from tests.zoo import share_case

SAME = 1e-9
"""Largest difference of outputs in double precision."""


@pytest.fixture(scope="module")
def case():
    return share_case("flatten method")


@pytest.fixture(scope="module")
def inputs(case):
    return np.random.default_rng(0).standard_normal((24, *case.inputs.shape[1:]))


@pytest.fixture(scope="module")
def plan(case, inputs):
    return cn.plan(cn.search(case.model, inputs, units=0.5, effort="quick"))


def list_weights(model):
    return {name: value.numpy() for name, value in model.state_dict().items()}


ACTIONS = {
    "score": lambda case, inputs, plan, folder: dict(cn.score(case.model, case.inputs, case.labels)),
    "search": lambda case, inputs, plan, folder: dict(cn.search(case.model, inputs, units=0.5, effort="quick")),
    "prune": lambda case, inputs, plan, folder: list_weights(
        cn.prune(case.model, plan, inputs, compensate="least_squares")
    ),
    "mask": lambda case, inputs, plan, folder: list_weights(cn.mask(case.model, plan)),
    "load": lambda case, inputs, plan, folder: list_weights(cn.load(save(case, inputs, plan, folder), case.model)),
    "masks": lambda case, inputs, plan, folder: {
        name: mask.numpy() for name, mask in cn.as_masks(plan, case.model).items()
    },
}


def save(case, inputs, plan, folder):
    cn.save(cn.prune(case.model, plan, inputs), folder, plan=plan, overwrite=True)
    return folder


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_default_device(case, inputs, plan, tmp_path, action):
    wanted = action(case, inputs, plan, tmp_path / "smaller")
    torch.set_default_device("meta")
    try:
        found = action(case, inputs, plan, tmp_path / "smaller")
    finally:
        torch.set_default_device(None)
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)


def test_default_device_of_exports(case, inputs, plan, tmp_path):
    """An export is run and compared with the model it is made from."""
    with torch.device("meta"):
        assert cn.export(case.model, tmp_path / "model.pt2", example=inputs[:2]).difference < SAME
