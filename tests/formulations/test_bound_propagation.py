from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from critical_neurons.core.network import Relu
from critical_neurons.errors import InvalidSettingError
from critical_neurons.formulations.bound_propagation import backward, bound_network
from critical_neurons.readers import read_network
from tests.zoo import ZOO, share_case

ROUNDING = 1e-12


@pytest.mark.parametrize("name", ZOO)
def test_radius_zero_gives_the_pre_activations(name):
    case = share_case(name)
    values = case.network.evaluate(case.inputs)
    for index, interval in bound_network(case.network, case.inputs).before_relu.items():
        assert interval.lower is interval.upper
        assert np.array_equal(interval.lower, values[case.network.ops[index].source])


@pytest.mark.parametrize("name", ["mlp", "mlp without biases", "mlp of three hidden layers"])
def test_bounds_are_those_of_the_equation(name):
    """L = W+ L + W- U + b and U = W+ U + W- L + b, clamped at zero behind each ReLU; bias included."""
    case = share_case(name)
    linear = [module for module in case.model if isinstance(module, nn.Linear)]
    lower, upper = case.inputs - 0.1, case.inputs + 0.1
    for module, interval in zip(
        linear, bound_network(case.network, case.inputs, radius=0.1).before_relu.values(), strict=False
    ):
        weight = module.weight.detach().numpy()
        bias = 0.0 if module.bias is None else module.bias.detach().numpy()
        positive, negative = np.maximum(weight, 0), np.minimum(weight, 0)
        lower, upper = (
            lower @ positive.T + upper @ negative.T + bias,
            upper @ positive.T + lower @ negative.T + bias,
        )
        assert np.allclose(interval.lower, lower, rtol=0, atol=ROUNDING)
        assert np.allclose(interval.upper, upper, rtol=0, atol=ROUNDING)
        lower, upper = np.maximum(lower, 0), np.maximum(upper, 0)


@pytest.mark.parametrize("name", ["mlp", "stride, padding and dilation", "nest", "convolution in one dimension"])
def test_first_bounds_are_attained_at_a_corner(name):
    """One affine map is bounded exactly: the gradient's sign is the corner."""
    case = share_case(name)
    index, relu = next((index, op) for index, op in enumerate(case.network.ops) if isinstance(op, Relu))
    maps = [op.map for op in case.network.ops[1:index]]
    seed = np.zeros((len(case.inputs), *relu.shape))
    seed.reshape(len(seed), -1)[:, 1] = 1.0
    gradient = seed
    for linear in reversed(maps):
        gradient = linear.adjoint(gradient)
    interval = bound_network(case.network, case.inputs, radius=0.2).before_relu[index]
    for sign, end in ((-1, interval.lower), (1, interval.upper)):
        corner = case.network.evaluate(case.inputs + 0.2 * sign * np.sign(gradient))[relu.source]
        assert np.allclose(corner.reshape(len(corner), -1)[:, 1], end.reshape(len(end), -1)[:, 1], atol=ROUNDING)


@pytest.mark.parametrize("name", ZOO)
def test_bounds_widen_with_the_radius(name):
    case = share_case(name)
    narrow, wide = (bound_network(case.network, case.inputs, radius=radius).before_relu for radius in (0.01, 0.02))
    for index in narrow:
        assert np.all(wide[index].lower <= narrow[index].lower + ROUNDING)
        assert np.all(narrow[index].upper <= wide[index].upper + ROUNDING)
        assert np.all(narrow[index].lower <= narrow[index].upper)


def test_inputs_outside_the_unit_box_keep_their_box():
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 2)).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    inputs = np.array([[-3.0], [7.0]])
    network = read_network(model, torch.from_numpy(inputs))
    (interval,) = bound_network(network, inputs, radius=0.5).before_relu.values()
    assert interval.lower.tolist() == [[-3.5], [6.5]]
    assert interval.upper.tolist() == [[-2.5], [7.5]]


@pytest.mark.parametrize("method", ["interval", "backward"])
@pytest.mark.parametrize("pruned", [False, True])
def test_clips_are_bounded_as_one_function(method, pruned):
    """Behind a clip to [0, c] the ends are those of p, clipped; where scores may fall the lower end is 0."""
    model = nn.Sequential(nn.Conv1d(1, 4, 1, bias=False), nn.ReLU6(), nn.MaxPool1d(1), nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, -1.0, 4.0, 0.5]).reshape(4, 1, 1))
    inputs = np.linspace(-10.0, 10.0, 12).reshape(3, 1, 4)
    network = read_network(model.double(), torch.from_numpy(inputs))
    bounds = bound_network(network, inputs, radius=2.5, method=method, pruned=pruned)
    (clipped,), (before, _) = bounds.before_pool.values(), bounds.before_relu.values()
    assert np.any((before.lower < 0) & (before.upper > 6))
    assert np.any((before.lower > 0) & (before.lower < 6) & (before.upper > 6))
    lowest = 0.0 if pruned else np.clip(before.lower, 0, 6)
    assert np.allclose(clipped.lower, lowest, rtol=0, atol=ROUNDING)
    assert np.allclose(clipped.upper, np.clip(before.upper, 0, 6), rtol=0, atol=ROUNDING)


def test_backward_substitution_pulls_a_clip_back_through_its_own_lines():
    """clip(x) + clip(1 - x) = 1 for clips to [0, 1] and x in [-1, 2], where x/2 <= clip(x) <= (x + 1)/2."""
    model = nn.Sequential(
        nn.Linear(1, 2), nn.Hardtanh(0.0, 1.0), nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 2)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[0].bias.copy_(torch.tensor([0.0, 1.0]))
        model[2].weight.fill_(1.0)
    inputs = np.array([[0.5]])
    network = read_network(model.double(), torch.from_numpy(inputs))
    for method, ends in (("interval", (0.0, 2.0)), ("backward", (0.5, 1.5))):
        last = list(bound_network(network, inputs, radius=1.5, method=method).before_relu.values())[-1]
        assert (last.lower.item(), last.upper.item()) == pytest.approx(ends, abs=ROUNDING)


def test_backward_substitution_sees_what_stands_twice():
    """|x| as max(x, 0) + max(-x, 0) on [-1, 1]: at most 1, where interval arithmetic says 2."""
    model = nn.Sequential(
        nn.Linear(1, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False), nn.ReLU(), nn.Linear(1, 2)
    ).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        model[2].weight.fill_(1.0)
    inputs = np.zeros((1, 1))
    network = read_network(model, torch.from_numpy(inputs))
    for method, highest in (("interval", 2.0), ("backward", 1.0)):
        second = list(bound_network(network, inputs, radius=1.0, method=method).before_relu.values())[1]
        assert second.upper.item() == pytest.approx(highest, abs=ROUNDING)


def test_one_score_stands_at_every_position():
    """A feature map that is 3 here and 2 there, the difference read: s (3 - 2) in [0, 1], not in [-2, 3]. A second
    one, which nobody reads: a layer with a single unit has no score."""
    model = nn.Sequential(
        *(nn.Conv1d(1, 2, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(4, 1, bias=False), nn.ReLU()),
        nn.Linear(1, 2),
    ).double()
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[3].weight.copy_(torch.tensor([[1.0, -1.0, 0.0, 0.0]]))
    inputs = np.array([[[3.0, 2.0]]])
    network = read_network(model, torch.from_numpy(inputs))
    for method, ends in (("interval", (-2.0, 3.0)), ("backward", (0.0, 1.0))):
        second = list(bound_network(network, inputs, pruned=True, method=method).before_relu.values())[1]
        assert (second.lower.item(), second.upper.item()) == pytest.approx(ends, abs=ROUNDING)


@pytest.mark.parametrize("settings", [{"pruned": True}, {"radius": 0.05}], ids=["pruned", "box"])
@pytest.mark.parametrize("name", ZOO)
def test_backward_substitution_is_never_wider(name, settings):
    case = share_case(name)
    plain, tight = (
        bound_network(case.network, case.inputs, method=method, **settings) for method in ("interval", "backward")
    )
    for part in ("before_relu", "before_pool"):
        for index, interval in getattr(plain, part).items():
            tighter = getattr(tight, part)[index]
            assert np.all(tighter.lower >= interval.lower - ROUNDING)
            assert np.all(tighter.upper <= interval.upper + ROUNDING)


def test_unknown_methods():
    case = share_case("mlp")
    with pytest.raises(InvalidSettingError, match=r"method: found 'crown'. Accepted: 'interval', 'backward'"):
        bound_network(case.network, case.inputs, method="crown")


def test_networks_too_large_for_backward_substitution(monkeypatch):
    monkeypatch.setattr(backward, "MOST_WORK", 100)
    case = share_case("mlp")
    with pytest.raises(InvalidSettingError, match=r"too large for 'backward'.*Use 'interval'"):
        bound_network(case.network, case.inputs, radius=0.1, method="backward")
