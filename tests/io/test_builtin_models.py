import pytest
import torch
from torch import nn

from critical_neurons.errors import InvalidSettingError
from critical_neurons.io.builtin_models import MODELS, fc3, fc4, lenet5, resnet20, vgg16


def widths(model: nn.Module) -> list[int]:
    return [layer.weight.shape[0] for layer in model if isinstance(layer, nn.Linear | nn.Conv2d)]


@pytest.mark.parametrize("name", MODELS)
def test_every_built_in_network_gives_logits_for_its_input_shape(name):
    builtin = MODELS[name]
    model = builtin.factory().eval()
    with torch.no_grad():
        assert model(torch.zeros(2, *builtin.input_shape)).shape == (2, 10)


def test_widths_are_the_papers():
    assert widths(fc3()) == [300, 100, 10]
    assert widths(fc4()) == [200, 100, 100, 10]
    assert widths(lenet5()) == [6, 16, 120, 84, 10]
    assert widths(vgg16()) == [64, 64, 128, 128, *[256] * 3, *[512] * 6, 512, 10]


def test_resnet20_has_twenty_layers_with_weights():
    """And a convolution in two shortcuts. Its weights are 0.27 million, as He and others count them."""
    layers = [module for module in resnet20().modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    assert len(layers) == 20 + 2
    assert [len(layer.weight) for layer in layers] == [16] * 7 + [32] * 7 + [64] * 7 + [10]
    assert sum(layer.weight.numel() for layer in layers) == 270_896


def test_vgg16_keys_are_those_of_the_trained_checkpoint():
    """`checkpoints/vgg16_cifar10.safetensors`: indices of one Sequential, a pooling after each group."""
    keys = set(vgg16().state_dict())
    convolutions = [0, 3, 7, 10, 14, 17, 20, 24, 27, 30, 34, 37, 40]
    expected = {f"{index}.{part}" for index in [*convolutions, 45, 47] for part in ("weight", "bias")}
    norm_parts = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected |= {f"{index + 1}.{part}" for index in convolutions for part in norm_parts}
    assert keys == expected


@pytest.mark.parametrize("factory", [fc3, fc4, lenet5, vgg16])
@pytest.mark.parametrize(("classes", "channels", "size"), [(7, 1, 32), (3, 2, 64)])
def test_classes_channels_and_size_are_free(factory, classes, channels, size):
    model = factory(classes=classes, channels=channels, size=size).eval()
    with torch.no_grad():
        assert model(torch.zeros(1, channels, size, size)).shape == (1, classes)


@pytest.mark.parametrize("factory", [lenet5, vgg16])
def test_too_small_images_are_refused(factory):
    with pytest.raises(InvalidSettingError, match="32 or more pixels"):
        factory(size=16)
