"""The architectures of the benchmark run, are the same every time and are what their names say."""

import pytest
import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from architectures import ARCHITECTURES, call, find_output_layers

LARGE = {
    *("alexnet", "googlenet", "inception_v3", "densenet121", "vgg11", "vgg16", "vgg16_bn", "char_cnn", "siamese"),
    *("resnet18", "resnet34", "resnet50", "resnext50_32x4d", "se_resnet50", "preact_resnet18"),
    *("resnet18_group_norm", "regnet_y_400mf", "mobilenet_v1", "efficientnet_b0", "mnasnet_b1", "ghostnet"),
    *("xception", "repvgg_a0", "dla_cifar", "convnext_tiny", "mlp_mixer_s16", "vit_tiny", "alphazero", "crnn"),
    *("unet", "unet_bilinear", "segnet", "fcn_resnet18", "deeplab_v3_plus_resnet18", "diffusion_unet"),
    *("edsr_baseline", "rcan_block_edsr", "style_transfer", "dncnn", "pix2pix_generator", "ecg_resnet1d"),
    *("yolo_v3_tiny", "fpn_resnet18", "retinanet_resnet18", "centernet_resnet18"),
}
"""More than about 0.3 seconds each."""

PUBLISHED = {
    "lenet5": 61_706,
    "pytorch_mnist_example": 1_199_882,
    "alexnet": 61_100_840,
    "squeezenet1_1": 1_235_496,
    "inception_v3": 23_834_568,
    "densenet121": 7_978_856,
    "resnet20_cifar": 269_722,
    "resnet56_cifar": 853_018,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnext50_32x4d": 25_028_904,
    "regnet_y_400mf": 4_344_144,
    "mobilenet_v2": 3_504_872,
    "mobilenet_v3_small": 2_542_856,
    "efficientnet_b0": 5_288_548,
    "mnasnet_b1": 4_383_312,
    "shufflenet_v2": 2_278_604,
    "convnext_tiny": 28_589_128,
}
"""Parameters, as torchvision and the authors count them."""


def params(names):
    return [
        pytest.param(name, marks=pytest.mark.slow if name in LARGE or at % 5 else ()) for at, name in enumerate(names)
    ]


@pytest.mark.parametrize("architecture", params(ARCHITECTURES))
def test_runs_repeats_and_uses_every_parameter(architecture):
    chosen = ARCHITECTURES[architecture]
    model, again = chosen.builder(), chosen.builder()
    outputs = tree_leaves(call(model, chosen.example()))
    repeated = tree_leaves(call(again, chosen.example()))
    assert not model.training
    assert all(torch.equal(first, second) for first, second in zip(outputs, repeated, strict=True))
    assert all(torch.isfinite(values).all() for values in outputs)
    sum(values.sum() for values in outputs).backward()
    assert [name for name, values in model.named_parameters() if values.grad is None] == []


@pytest.mark.parametrize("architecture", params(ARCHITECTURES))
def test_outputs_come_from_the_layers_named(architecture):
    """The last convolution or linear layer to run is one of them; networks of bare parameters have none."""
    chosen = ARCHITECTURES[architecture]
    model = chosen.builder()
    named = find_output_layers(chosen, model)
    ran = []
    for module in model.modules():
        if isinstance(module, (nn.Linear, _ConvNd)):
            module.register_forward_hook(lambda module, *_: ran.append(module))
    with torch.no_grad():
        call(model, chosen.example())
    last = {each for layer in named if isinstance(layer, nn.Module) for each in layer.modules()}
    assert named
    assert not ran or ran[-1] in last


@pytest.mark.parametrize("architecture", params(PUBLISHED))
def test_has_the_published_number_of_parameters(architecture):
    model = ARCHITECTURES[architecture].builder()
    assert sum(values.numel() for values in model.parameters()) == PUBLISHED[architecture]


def test_there_are_many_of_many_families():
    assert len(ARCHITECTURES) >= 65
    assert len({chosen.family for chosen in ARCHITECTURES.values()}) >= 10
