"""Laws of structures, over the zoo and over networks drawn at random."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from critical_neurons.core.costs import count_cost, count_new_biases
from critical_neurons.core.structure import NO_UNIT, Structure
from critical_neurons.errors import CriticalNeuronsError
from critical_neurons.removal.metrics import count_macs
from critical_neurons.removal.remove import remove_units, zero_units
from critical_neurons.removal.same_outputs import run_evenly
from critical_neurons.structure import OUTPUT, find_structure
from tests.structure import idioms
from tests.structure.checks import (
    assert_alike,
    assert_removable,
    draw_stays,
    remove_alone,
    train_looks,
)
from tests.structure.drawn import draw_network
from tests.structure.idioms import IDIOMS, Written
from tests.zoo import CORE, ZOO, build_model, draw_inputs

DRAWN = {"deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}


@pytest.fixture(scope="module")
def found():
    """The structure of every network of the zoo, found once."""
    known = {}

    def find(name):
        if name not in known:
            model, inputs = build_model(name), draw_inputs(name, 3)
            known[name] = model, inputs, find_structure(model, inputs)
        return known[name]

    return find


def assert_sound(model, structure, inputs, seed):
    """All laws of one structure."""
    assert structure.unit_count > 0
    assert_removable(model, structure, draw_stays(structure, seed), inputs)
    for group in structure.groups:
        assert_removable(model, structure, remove_alone(structure, int(group.units[seed % len(group)])), inputs)
    for layer in structure.layers:
        assert bool(layer.reason) == bool((layer.units == NO_UNIT).all())
    stays = draw_stays(structure, seed + 1)
    smaller = remove_units(model, structure, stays)
    kept = stays.astype(float)
    added = count_new_biases(structure.wirings, kept)
    parameters = sum(values.numel() for values in smaller.parameters())
    assert count_cost(structure, kept, "params") + added == pytest.approx(parameters, abs=1e-6)
    assert count_cost(structure, kept, "macs") == pytest.approx(count_macs(smaller, inputs), abs=1e-6)


@pytest.mark.syntax
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo(found, name):
    model, inputs, structure = found(name)
    assert_sound(model, structure, inputs, seed=0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_by_other_plans(found, name, seed):
    model, inputs, structure = found(name)
    assert_sound(model, structure, inputs, seed)


@pytest.mark.parametrize(
    "name", [name if name in CORE else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]
)
def test_every_unit_alone(found, name):
    model, inputs, structure = found(name)
    for unit in range(structure.unit_count):
        assert_removable(model, structure, remove_alone(structure, unit), inputs)


@pytest.mark.parametrize("name", [name for name in ZOO if "softmax" not in name])
def test_what_is_said_to_give_the_output_does(found, name):
    """What is not a number in one channel of it then stays in a part of the outputs; another channel has another."""
    model, inputs, structure = found(name)
    named = [layer.name for layer in structure.layers if layer.reason == OUTPUT]
    others = [layer.name for layer in structure.layers if not layer.reason and layer.size > 1]
    assert named
    assert all(len(set(mark_outputs(model, layer, inputs))) > 1 for layer in named)
    assert all(len(set(mark_outputs(model, layer, inputs))) == 1 for layer in others if name not in STREAMS)


STREAMS = ("maxima", "max pool before the relu", "mobilenet", "padded max pool")
"""Where a maximum, or a layer that reads a part of the channels, hides what is not a number."""


def mark_outputs(model, name, inputs):
    """Which outputs are no numbers, for either of the first two channels of a layer."""
    for channel in range(2):
        changed = copy.deepcopy(model)
        module = changed.get_submodule(name)
        axis = 1 if isinstance(module, nn.modules.conv._ConvTransposeNd) else 0
        with torch.no_grad():
            module.weight.select(axis, channel).fill_(float("nan"))
        yield tuple(torch.cat([values.flatten() for values in run_evenly(changed, inputs)]).isnan().tolist())


@pytest.mark.parametrize("name", [name for name, idiom in IDIOMS.items() if any(idiom.reasons.values())])
def test_reasons_name_a_line_that_was_run(name):
    """Every line that a reason names is one of a forward in the file of idioms."""
    structure = find_structure(train_looks(IDIOMS[name].build()), IDIOMS[name].inputs)
    text = "; ".join(layer.reason for layer in structure.layers)
    lines = Path(idioms.__file__).read_text().splitlines()
    for file, line in re.findall(r"(\w+\.py):(\d+)", text):
        assert file == "idioms.py"
        assert re.search(r"model|self|\bm\b|\bx\b", lines[int(line) - 1]), lines[int(line) - 1]


@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, **DRAWN)
def test_networks_drawn_at_random(seed):
    check_drawn(seed)


@pytest.mark.slow
@given(seed=st.integers(0, 10**9))
@settings(max_examples=600, **DRAWN)
def test_many_networks_drawn_at_random(seed):
    check_drawn(seed)


def check_drawn(seed):
    model, inputs = draw_network(seed)
    model = train_looks(model, seed)
    assert_sound(model, find_structure(model, inputs), inputs, seed)


@pytest.mark.parametrize("name", ["mlp", "resnet", "grouped convolutions", "decoder", "nest"])
def test_plain_data_and_back(found, name):
    _, _, structure = found(name)
    data = json.loads(json.dumps(structure.to_dict()))
    assert Structure.from_dict(data).to_dict() == structure.to_dict()


@pytest.mark.parametrize("name", [name for name in ZOO if "constants" not in name])
def test_zeroing_activations_by_hooks(found, name):
    """Another way of masking: what a layer gives is set to zero behind it and its batch norms."""
    model, inputs, structure = found(name)
    if any(wiring.constants.any() for wiring in structure.wirings):
        pytest.skip("what is left of a unit goes into biases")
    stays = draw_stays(structure, seed=3)
    hooked = copy.deepcopy(model)
    for wiring in structure.wirings:
        kept = torch.from_numpy(stays[wiring.outputs])

        def zero(module, args, output, kept=kept):
            axis = 1 if isinstance(module, nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm) else -1
            shape = [1] * output.ndim
            shape[axis] = -1
            return output * kept.reshape(shape)

        hooked.get_submodule(wiring.module).register_forward_hook(zero)
    assert_alike(run_evenly(hooked, inputs), run_evenly(zero_units(model, structure, stays), inputs))


def test_constants_left_by_functions_go_into_biases():
    """A batch norm behind the ReLU: the unit held at zero there, and the model that lacks it, are one function."""
    model, inputs = build_model("batch norm behind the relu"), draw_inputs("batch norm behind the relu", 5)
    structure = find_structure(model, inputs)
    stays = remove_alone(structure, 1)
    layer = next(layer for layer in structure.layers if layer.name == "0")
    hooked = copy.deepcopy(model)
    hooked[1].register_forward_hook(lambda module, args, output: output * torch.from_numpy(stays[layer.units]))
    assert_alike(run_evenly(hooked, inputs), run_evenly(remove_units(model, structure, stays), inputs))


def describe_surroundings(model):
    return {
        "parameters": {name: (id(values), values.requires_grad) for name, values in model.named_parameters()},
        "values": {name: values.clone() for name, values in model.state_dict().items()},
        "modes": [module.training for module in model.modules()],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        "random": torch.get_rng_state().tolist(),
        "torch": (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()),
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "warnings": list(warnings.filters),
    }


def assert_undisturbed(model, inputs, act):
    before = describe_surroundings(model)
    given_inputs = inputs.clone()
    act()
    after = describe_surroundings(model)
    values = zip(before.pop("values").items(), after.pop("values").items(), strict=True)
    assert all(one[0] == other[0] and torch.equal(one[1], other[1]) for one, other in values)
    assert before == after
    assert torch.equal(given_inputs, inputs)


@pytest.mark.parametrize(
    "name", ["class token, places, scale", "size written down", "random sampling", "encoder layer"]
)
def test_nothing_else_changes(name):
    model = IDIOMS[name].build().double().train()
    next(model.parameters()).requires_grad_(False)
    model.register_forward_hook(lambda module, args, output: None)
    assert_undisturbed(model, IDIOMS[name].inputs, lambda: find_structure(model, IDIOMS[name].inputs))


def test_nothing_else_changes_when_the_forward_raises():
    def fail(model, x):
        model.inner(x)
        torch.rand(3)
        raise RuntimeError("no")

    model, inputs = Written(fail, inner=nn.Linear(4, 3)), torch.zeros(2, 4)

    def act():
        with pytest.raises(CriticalNeuronsError, match="does not run"):
            find_structure(model, inputs)

    assert_undisturbed(model, inputs, act)
