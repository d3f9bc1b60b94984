"""Law: compensation changes values only, for every network of the zoo, and what it leaves is finite."""

from __future__ import annotations

import pytest
import torch

import critical_neurons as cn
from critical_neurons.core.batch import digest_rows
from tests.drawing import draw_plan
from tests.zoo import ZOO, build_model, draw_inputs, first_or_slow


@pytest.mark.parametrize("method", first_or_slow("least_squares", "bias"))
@pytest.mark.parametrize("name", ZOO)
def test_compensated_networks_have_the_same_structure_and_can_be_saved(name, method, tmp_path):
    model, inputs = build_model(name), draw_inputs(name, 64, seed=3)
    plan = draw_plan(cn.inspect(model, inputs), seed=0)
    plain = cn.prune(model, plan, inputs[:2])
    refitted = cn.prune(model, plan, inputs[:2], compensate=method, calibration=inputs)
    shapes = {name: values.shape for name, values in refitted.state_dict().items()}
    expected = {name: values.shape for name, values in plain.state_dict().items()}
    gained = set(shapes) - set(expected)
    assert all(name.endswith("bias") for name in gained)
    assert {name: shape for name, shape in shapes.items() if name not in gained} == expected
    fresh = draw_inputs(name, 5, seed=9)
    with torch.no_grad():
        assert torch.isfinite(refitted(fresh)).all()
        assert refitted(fresh).shape == model(fresh).shape
    cn.save(refitted, tmp_path / "smaller", plan=plan)
    again = cn.load(tmp_path / "smaller", lambda: build_model(name))
    with torch.no_grad():
        assert torch.equal(again(inputs), refitted(inputs))
    assert again.calibrated_on == refitted.calibrated_on == set(digest_rows(inputs.numpy()))
