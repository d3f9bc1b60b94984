"""Parameters and buffers of the smaller model take gradients, and carry what hangs on them, as those of the model."""

import pytest
import torch
from torch import nn

import critical_neurons as cn


class Marked(nn.Parameter):
    """A user's own class."""


FROZEN = ("0.weight", "1.bias", "4.bias")


def build():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 6),
        nn.ReLU(),
        nn.Linear(6, 3),
    ).eval()
    for name, values in (*model.named_parameters(), *model.named_buffers()):
        values.note = name
    for name in FROZEN:
        model.get_parameter(name).requires_grad_(False)
    model[4].weight = Marked(model[4].weight.detach())
    model[4].weight.note = "4.weight"
    return model


def make_smaller(model, inputs, compensate):
    plan = cn.plan(cn.search(model, inputs, units=0.5, effort="quick"))
    return cn.mask(model, plan) if compensate == "mask" else cn.prune(model, plan, inputs, compensate=compensate)


WAYS = ["mask", "none", "bias", "least_squares", cn.Distillation(seconds=1.0, steps=2)]


@pytest.mark.parametrize("compensate", WAYS, ids=str)
def test_attributes_survive(compensate):
    model, inputs = build(), torch.randn(24, 1, 6, 6)
    smaller = make_smaller(model, inputs, compensate)
    for name, values in smaller.named_parameters():
        if name != "0.bias":  # which refitting may add
            assert values.requires_grad == (name not in FROZEN), name
            assert values.note == name
    assert smaller[1].running_mean.note == "1.running_mean"
    assert type(smaller[4].weight) is Marked


@pytest.mark.parametrize("compensate", WAYS[:4], ids=str)
def test_hooks_of_modules_survive_and_those_of_tensors_do_not(compensate):
    model, inputs, called = build(), torch.randn(24, 1, 6, 6), []
    plan = cn.plan(cn.search(model, inputs, units=0.5, effort="quick"))
    model[4].register_forward_hook(lambda *given: called.append("forward"))
    model[4].weight.register_hook(lambda slope: called.append("gradient"))
    smaller = cn.mask(model, plan) if compensate == "mask" else cn.prune(model, plan, inputs, compensate=compensate)
    called.clear()
    smaller(inputs).sum().backward()
    assert called == ["forward"]
    assert model[4].weight.grad is None
    model(inputs).sum().backward()
    assert called == ["forward", "forward", "gradient"]


def test_attributes_survive_lossless():
    model = build()
    with torch.no_grad():
        model[4].bias[:2] = -100.0
    smaller = cn.lossless(model, (0.0, 1.0), inputs=torch.rand(4, 1, 6, 6), time_limit=5.0).model
    assert smaller[4].out_features < 6
    assert not smaller[4].bias.requires_grad
    assert smaller[4].weight.requires_grad
    assert smaller[4].weight.note == "4.weight"
