"""Convolutional classifiers without residual sums: plain, branched, densely connected."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.blocks import Concat, Pooled, conv, relu_in_place
from architectures.registry import Architecture, image

FAMILY = "convolutional"


class LeNet5(nn.Module):
    """LeCun et al. 1998, with ReLU, as usual today."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), (2, 2))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = x.view(-1, self.num_flat_features(x))
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)

    def num_flat_features(self, x: Tensor) -> int:
        count = 1
        for size in x.size()[1:]:
            count *= size
        return count


class MnistNet(nn.Module):
    """The network of PyTorch's MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = self.dropout2(F.relu(self.fc1(torch.flatten(x, 1))))
        return F.log_softmax(self.fc2(x), dim=1)


class CifarTutorialNet(nn.Module):
    """The network of PyTorch's CIFAR-10 tutorial in its first version, with a hard-coded flattened size."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv2(self.pool(F.relu(self.conv1(x))))))
        x = x.view(-1, 16 * 5 * 5)
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


class AlexNet(nn.Module):
    """Krizhevsky 2014, the variant for one device."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 11, 4, 2), relu_in_place(), nn.MaxPool2d(3, 2)]
        layers += [nn.Conv2d(64, 192, 5, padding=2), relu_in_place(), nn.MaxPool2d(3, 2)]
        for inputs, outputs in ((192, 384), (384, 256), (256, 256)):
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), relu_in_place()]
        self.features = nn.Sequential(*layers, nn.MaxPool2d(3, 2))
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            *(nn.Dropout(), nn.Linear(256 * 6 * 6, 4096), relu_in_place()),
            *(nn.Dropout(), nn.Linear(4096, 4096), relu_in_place()),
            nn.Linear(4096, 1000),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(x.view(x.size(0), 256 * 6 * 6))


class VGG(nn.Module):
    """Simonyan and Zisserman 2015, for CIFAR: one linear layer. `M` is max pooling."""

    def __init__(self, layout: str, *, norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for item in layout.split():
            if item == "M":
                layers.append(nn.MaxPool2d(2, 2))
                continue
            layers.append(nn.Conv2d(inputs, int(item), 3, padding=1))
            layers += [nn.BatchNorm2d(int(item)), relu_in_place()] if norm else [relu_in_place()]
            inputs = int(item)
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        out = self.features(x)
        return self.classifier(out.view(out.size(0), -1))


class HardCodedVGG(VGG):
    """VGG with a hard-coded number of features in `forward`."""

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).view(-1, 512))


def network_in_network() -> nn.Module:
    """Lin et al. 2014, for CIFAR-10."""
    plain = partial(conv, norm=None)
    return nn.Sequential(
        *(plain(3, 192, 5), plain(192, 160, 1), plain(160, 96, 1), nn.MaxPool2d(3, 2, 1), nn.Dropout(0.5)),
        *(plain(96, 192, 5), plain(192, 192, 1), plain(192, 192, 1), nn.AvgPool2d(3, 2, 1), nn.Dropout(0.5)),
        *(plain(192, 192, 3), plain(192, 192, 1), plain(192, 10, 1)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    )


class Fire(nn.Module):
    def __init__(self, inputs: int, squeezed: int, expanded: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(inputs, squeezed, 1)
        self.expand1x1 = nn.Conv2d(squeezed, expanded, 1)
        self.expand3x3 = nn.Conv2d(squeezed, expanded, 3, padding=1)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.activation(self.squeeze(x))
        return torch.cat([self.activation(self.expand1x1(x)), self.activation(self.expand3x3(x))], 1)


class SqueezeNet(nn.Module):
    """Iandola et al. 2016, version 1.1; the classifier is a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 64, 3, 2), relu_in_place(), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(Fire(64, 16, 64), Fire(128, 16, 64), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(Fire(128, 32, 128), Fire(256, 32, 128), nn.MaxPool2d(3, 2, ceil_mode=True)),
            *(Fire(256, 48, 192), Fire(384, 48, 192), Fire(384, 64, 256), Fire(512, 64, 256)),
        )
        self.final_conv = nn.Conv2d(512, 1000, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.final_conv(F.dropout(self.features(x), 0.5, self.training)), inplace=True)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return x.view(x.size(0), 1000)


def inception(inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pooled: int) -> nn.Module:
    """Szegedy et al. 2015, with batch normalisation."""
    return Concat(
        conv(inputs, one, 1),
        nn.Sequential(conv(inputs, three[0], 1), conv(three[0], three[1], 3)),
        nn.Sequential(conv(inputs, five[0], 1), conv(five[0], five[1], 5)),
        nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(inputs, pooled, 1)),
    )


def googlenet() -> nn.Module:
    pool = partial(nn.MaxPool2d, 3, 2, ceil_mode=True)
    features = nn.Sequential(
        *(conv(3, 64, 7, 2), pool(), conv(64, 64, 1), conv(64, 192, 3), pool()),
        inception(192, 64, (96, 128), (16, 32), 32),
        *(inception(256, 128, (128, 192), (32, 96), 64), pool()),
        inception(480, 192, (96, 208), (16, 48), 64),
        inception(512, 160, (112, 224), (24, 64), 64),
        inception(512, 128, (128, 256), (24, 64), 64),
        inception(512, 112, (144, 288), (32, 64), 64),
        *(inception(528, 256, (160, 320), (32, 128), 128), pool()),
        inception(832, 256, (160, 320), (32, 128), 128),
        *(inception(832, 384, (192, 384), (48, 128), 128), nn.Dropout(0.2)),
    )
    return Pooled(features, 1024)


def inception_v3() -> nn.Module:
    """Szegedy et al. 2016: 7x7 factorised into 1x7 and 7x1, 3x3 into parallel 1x3 and 3x1; no auxiliary head."""
    average = partial(nn.AvgPool2d, 3, 1, 1)
    tight = partial(conv, padding=0)

    def first(inputs: int, pooled: int) -> nn.Module:
        return Concat(
            conv(inputs, 64, 1),
            nn.Sequential(conv(inputs, 48, 1), conv(48, 64, 5)),
            nn.Sequential(conv(inputs, 64, 1), conv(64, 96), conv(96, 96)),
            nn.Sequential(average(), conv(inputs, pooled, 1)),
        )

    def second(width: int) -> nn.Module:
        wide, tall = (1, 7), (7, 1)
        return Concat(
            conv(768, 192, 1),
            nn.Sequential(conv(768, width, 1), conv(width, width, wide), conv(width, 192, tall)),
            nn.Sequential(
                *(conv(768, width, 1), conv(width, width, tall), conv(width, width, wide)),
                *(conv(width, width, tall), conv(width, 192, wide)),
            ),
            nn.Sequential(average(), conv(768, 192, 1)),
        )

    def third(inputs: int) -> nn.Module:
        def fork(width: int) -> nn.Module:
            return Concat(conv(width, 384, (1, 3)), conv(width, 384, (3, 1)))

        return Concat(
            conv(inputs, 320, 1),
            nn.Sequential(conv(inputs, 384, 1), fork(384)),
            nn.Sequential(conv(inputs, 448, 1), conv(448, 384), fork(384)),
            nn.Sequential(average(), conv(inputs, 192, 1)),
        )

    features = nn.Sequential(
        *(tight(3, 32, 3, 2), tight(32, 32), conv(32, 64), nn.MaxPool2d(3, 2)),
        *(conv(64, 80, 1), tight(80, 192), nn.MaxPool2d(3, 2)),
        *(first(192, 32), first(256, 64), first(288, 64)),
        Concat(
            tight(288, 384, 3, 2),
            nn.Sequential(conv(288, 64, 1), conv(64, 96), tight(96, 96, 3, 2)),
            nn.MaxPool2d(3, 2),
        ),
        *(second(128), second(160), second(160), second(192)),
        Concat(
            nn.Sequential(conv(768, 192, 1), tight(192, 320, 3, 2)),
            nn.Sequential(conv(768, 192, 1), conv(192, 192, (1, 7)), conv(192, 192, (7, 1)), tight(192, 192, 3, 2)),
            nn.MaxPool2d(3, 2),
        ),
        *(third(1280), third(2048)),
    )
    return Pooled(features, 2048)


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(4 * growth), nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(F.relu(self.bn2(out)))
        return torch.cat([x, out], 1)


def densenet(depths: tuple[int, ...], growth: int, classes: int, *, cifar: bool = False) -> nn.Module:
    """Huang et al. 2017, with bottlenecks and halving transitions."""
    channels = 2 * growth
    layers: list[nn.Module] = [conv(3, channels)] if cifar else [conv(3, channels, 7, 2), nn.MaxPool2d(3, 2, 1)]
    for at, depth in enumerate(depths):
        for _ in range(depth):
            layers.append(DenseLayer(channels, growth))
            channels += growth
        layers += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        if at < len(depths) - 1:
            layers += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2)]
            channels //= 2
    return Pooled(nn.Sequential(*layers), channels, classes)


_eleven = "64 M 128 M 256 256 M 512 512 M 512 512 M"
_sixteen = "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M"

ARCHITECTURES = [
    Architecture(name, FAMILY, make, image(side, channels), (output,))
    for name, make, side, channels, output in (
        ("lenet5", LeNet5, 32, 1, "fc3"),
        ("pytorch_mnist_example", MnistNet, 28, 1, "fc2"),
        ("pytorch_cifar_tutorial", CifarTutorialNet, 32, 3, "fc3"),
        ("alexnet", AlexNet, 96, 3, "classifier.6"),
        ("vgg11", partial(VGG, _eleven, norm=False), 32, 3, "classifier"),
        ("vgg16", partial(HardCodedVGG, _sixteen, norm=False), 32, 3, "classifier"),
        ("vgg16_bn", partial(VGG, _sixteen, norm=True), 32, 3, "classifier"),
        ("network_in_network", network_in_network, 32, 3, "12.0"),
        ("squeezenet1_1", SqueezeNet, 96, 3, "final_conv"),
        ("googlenet", googlenet, 96, 3, "fc"),
        ("inception_v3", inception_v3, 128, 3, "fc"),
        ("densenet121", partial(densenet, (6, 12, 24, 16), 32, 1000), 64, 3, "fc"),
        ("densenet_bc_40_12", partial(densenet, (6, 6, 6), 12, 10, cifar=True), 32, 3, "fc"),
    )
]
