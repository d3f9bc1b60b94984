"""Winograd convolutions: the values and gradients of torch's own, where they are used at all."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from critical_neurons_reproduction.winograd import FastConvolutions


def values_and_gradients(convolution: nn.Conv2d, inputs: Tensor) -> list[Tensor]:
    outputs = convolution(inputs)
    weights = torch.linspace(-1, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)
    return [outputs, *torch.autograd.grad(outputs, [inputs, *convolution.parameters()], weights)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("channels", "outputs", "height", "width"), [(64, 5, 8, 4), (70, 3, 6, 4), (65, 4, 2, 2)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_as_torch(channels, outputs, height, width, bias, layout):
    torch.manual_seed(0)
    convolution = nn.Conv2d(channels, outputs, 3, padding=1, bias=bias)
    inputs = torch.randn(3, channels, height, width).contiguous(memory_format=layout).requires_grad_()
    expected = values_and_gradients(convolution, inputs)
    with FastConvolutions():
        found = values_and_gradients(convolution, inputs)
    assert expected[0].grad_fn.name() != found[0].grad_fn.name()
    for one, other in zip(expected, found, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


@pytest.mark.parametrize(
    ("settings", "shape"),
    [
        ({"kernel_size": 3}, (128, 8, 8)),
        ({"kernel_size": 3, "padding": 1, "stride": 2}, (128, 8, 8)),
        ({"kernel_size": 3, "padding": 1, "groups": 2}, (256, 8, 8)),
        ({"kernel_size": 3, "padding": 2, "dilation": 2}, (128, 8, 8)),
        ({"kernel_size": 3, "padding": "same"}, (128, 8, 8)),
        ({"kernel_size": 1}, (128, 8, 8)),
        ({"kernel_size": 3, "padding": 1}, (128, 7, 8)),
        ({"kernel_size": 3, "padding": 1}, (63, 8, 8)),
        ({"kernel_size": 3, "padding": 1, "dtype": torch.float64}, (128, 8, 8)),
    ],
)
def test_others_are_left_to_torch(settings, shape):
    convolution = nn.Conv2d(shape[0], 4, **settings)
    inputs = torch.randn(2, *shape, dtype=convolution.weight.dtype)
    with FastConvolutions():
        found = convolution(inputs)
    assert torch.equal(found, convolution(inputs))
    assert found.grad_fn.name() == convolution(inputs).grad_fn.name()


def test_without_gradients_of_weights_more_channels_are_needed():
    inputs, weight = torch.randn(2, 64, 8, 8), torch.randn(4, 64, 3, 3)
    with FastConvolutions():
        found = functional.conv2d(inputs, weight, None, (1, 1), (1, 1))
    assert torch.equal(found, functional.conv2d(inputs, weight, None, (1, 1), (1, 1)))
