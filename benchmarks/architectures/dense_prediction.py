"""Images to images: segmentation and restoration."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.blocks import Residual, ResNetTrunk, SqueezeExcitation, conv, relu_in_place
from architectures.registry import Architecture, image

SEGMENTATION, RESTORATION = "segmentation", "restoration"


def double(inputs: int, outputs: int, middle: int | None = None) -> nn.Module:
    middle = middle or outputs
    return nn.Sequential(conv(inputs, middle, act=relu_in_place), conv(middle, outputs, act=relu_in_place))


class Up(nn.Module):
    """Upsampling by two, padded to the size of the skip connection if that is odd."""

    def __init__(self, inputs: int, outputs: int, *, bilinear: bool) -> None:
        super().__init__()
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = double(inputs, outputs, inputs // 2)
        else:
            self.up = nn.ConvTranspose2d(inputs, inputs // 2, 2, 2)
            self.conv = double(inputs, outputs)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.up(x1)
        dy, dx = x2.size()[2] - x1.size()[2], x2.size()[3] - x1.size()[3]
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    """Ronneberger et al. 2015, padded and with batch normalisation."""

    def __init__(self, *, bilinear: bool) -> None:
        super().__init__()
        last, less = (512, 2) if bilinear else (1024, 1)
        self.inc = double(3, 64)
        self.downs = nn.ModuleList(double(a, b) for a, b in ((64, 128), (128, 256), (256, 512), (512, last)))
        sizes = ((1024, 512 // less), (512, 256 // less), (256, 128 // less), (128, 64))
        self.ups = nn.ModuleList(Up(a, b, bilinear=bilinear) for a, b in sizes)
        self.outc = nn.Conv2d(64, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.inc(x)]
        for down in self.downs:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up in self.ups:
            x = up(x, skips.pop())
        return self.outc(x)


class SegNet(nn.Module):
    """Badrinarayanan et al. 2017 with three levels: max unpooling with the indices of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.unpool = nn.MaxPool2d(2, 2, return_indices=True), nn.MaxUnpool2d(2, 2)
        self.enc1, self.enc2, self.enc3 = double(3, 64), double(64, 128), double(128, 256)
        self.dec3, self.dec2 = double(256, 128, 256), double(128, 64, 128)
        self.dec1 = nn.Sequential(conv(64, 64), nn.Conv2d(64, 12, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.pool(self.enc1(x))
        x, second = self.pool(self.enc2(x))
        x, third = self.pool(self.enc3(x))
        x = self.dec3(self.unpool(x, third))
        x = self.dec2(self.unpool(x, second))
        return self.dec1(self.unpool(x, first))


class FCN(nn.Module):
    """Long et al. 2015 on a residual trunk, with an auxiliary head; outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = ResNetTrunk()
        self.classifier = nn.Sequential(conv(512, 128), nn.Dropout(0.1), nn.Conv2d(128, 21, 1))
        self.aux_classifier = nn.Sequential(conv(256, 64), nn.Dropout(0.1), nn.Conv2d(64, 21, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        size = x.shape[-2:]
        _, c4, c5 = self.backbone(x)
        resize = partial(F.interpolate, size=size, mode="bilinear", align_corners=False)
        return {"out": resize(self.classifier(c5)), "aux": resize(self.aux_classifier(c4))}


class ASPP(nn.Module):
    """Chen et al. 2017: dilated convolutions of several rates and global average pooling, in parallel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([conv(inputs, outputs, 1)])
        self.convs.extend(conv(inputs, outputs, 3, dilation=rate) for rate in (6, 12, 18))
        self.pooling = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(inputs, outputs, 1))
        self.project = nn.Sequential(conv(5 * outputs, outputs, 1), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        branches = [layer(x) for layer in self.convs]
        mean = F.interpolate(self.pooling(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        return self.project(torch.cat([*branches, mean], dim=1))


class DeepLab(nn.Module):
    """DeepLab v3+ of Chen et al. 2018 on ResNet-18: the decoder also reads an earlier stage."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.aspp = ResNetTrunk(), ASPP(512, 256)
        self.low = conv(128, 48, 1)
        self.decoder = nn.Sequential(conv(304, 256), conv(256, 256), nn.Conv2d(256, 21, 1))

    def forward(self, x: Tensor) -> Tensor:
        c3, _, c5 = self.backbone(x)
        low = self.low(c3)
        high = F.interpolate(self.aspp(c5), size=low.shape[2:], mode="bilinear", align_corners=False)
        out = self.decoder(torch.cat((high, low), dim=1))
        return F.interpolate(out, size=x.shape[2:], mode="bilinear", align_corners=False)


class DnCNN(nn.Module):
    """Zhang et al. 2017: residual learning, the layers predict the noise."""

    def __init__(self) -> None:
        super().__init__()
        layers = [conv(1, 64, norm=None), *(conv(64, 64) for _ in range(15)), nn.Conv2d(64, 1, 3, padding=1)]
        self.dncnn = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x - self.dncnn(x)


class SRCNN(nn.Module):
    """Dong et al. 2014."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 64, 9, padding=4)
        self.conv2 = nn.Conv2d(64, 32, 5, padding=2)
        self.conv3 = nn.Conv2d(32, 1, 5, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(F.relu(self.conv2(F.relu(self.conv1(x)))))


def fsrcnn() -> nn.Module:
    """Dong et al. 2016: shrink, map, expand, upsample by a transposed convolution; PReLU per channel."""
    layers: list[nn.Module] = [nn.Conv2d(1, 56, 5, padding=2), nn.PReLU(56), nn.Conv2d(56, 12, 1), nn.PReLU(12)]
    for _ in range(4):
        layers += [nn.Conv2d(12, 12, 3, padding=1), nn.PReLU(12)]
    layers += [nn.Conv2d(12, 56, 1), nn.PReLU(56), nn.ConvTranspose2d(56, 1, 9, 3, 4, output_padding=2)]
    return nn.Sequential(*layers)


class ESPCN(nn.Module):
    """Shi et al. 2016: upsampling by pixel shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 64, 5, padding=2)
        self.conv2 = nn.Conv2d(64, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 9, 3, padding=1)
        self.pixel_shuffle = nn.PixelShuffle(3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv2(torch.tanh(self.conv1(x))))
        return torch.sigmoid(self.pixel_shuffle(self.conv3(x)))


class ScaledBlock(nn.Module):
    def __init__(self, channels: int, scale: float, excited: bool) -> None:
        super().__init__()
        gate = SqueezeExcitation(channels, channels // 16) if excited else nn.Identity()
        self.body = nn.Sequential(conv(channels, channels, norm=None), nn.Conv2d(channels, channels, 3, 1, 1), gate)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x).mul(self.scale)
        out += x
        return out


class EDSR(nn.Module):
    """Lim et al. 2017, the baseline, 4x upsampling; with channel attention, the block of RCAN (2018)."""

    def __init__(self, blocks: int, *, excited: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor([0.4488, 0.4371, 0.4040]).view(1, 3, 1, 1))
        self.head = nn.Conv2d(3, 64, 3, padding=1)
        body = (ScaledBlock(64, 0.1, excited) for _ in range(blocks))
        self.body = nn.Sequential(*body, nn.Conv2d(64, 64, 3, padding=1))
        up = (nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2))
        again = (nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2))
        self.tail = nn.Sequential(*up, *again, nn.Conv2d(64, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.head(x - self.mean)
        res = self.body(x)
        res += x
        return self.tail(res) + self.mean


def stylising() -> nn.Module:
    """Johnson et al. 2016 with instance normalisation; nearest upsampling instead of transposed convolutions."""

    def layer(inputs: int, outputs: int, kernel: int, stride: int = 1, *, last: bool = False) -> nn.Module:
        layers = [nn.ReflectionPad2d(kernel // 2), nn.Conv2d(inputs, outputs, kernel, stride)]
        return nn.Sequential(*layers, *([] if last else [nn.InstanceNorm2d(outputs, affine=True)]))

    relu, up = nn.ReLU(), nn.Upsample(scale_factor=2, mode="nearest")
    return nn.Sequential(
        *(layer(3, 32, 9), relu, layer(32, 64, 3, 2), relu, layer(64, 128, 3, 2), relu),
        *(Residual(layer(128, 128, 3), nn.ReLU(), layer(128, 128, 3)) for _ in range(5)),
        *(up, layer(128, 64, 3), relu, up, layer(64, 32, 3), relu, layer(32, 3, 9, last=True)),
    )


ARCHITECTURES = [
    Architecture(name, family, make, image(side, channels), outputs)
    for name, family, make, side, channels, outputs in (
        ("unet", SEGMENTATION, partial(UNet, bilinear=False), 64, 3, ("outc",)),
        ("unet_bilinear", SEGMENTATION, partial(UNet, bilinear=True), 64, 3, ("outc",)),
        ("segnet", SEGMENTATION, SegNet, 64, 3, ("dec1.1",)),
        ("fcn_resnet18", SEGMENTATION, FCN, 64, 3, ("classifier.2", "aux_classifier.2")),
        ("deeplab_v3_plus_resnet18", SEGMENTATION, DeepLab, 96, 3, ("decoder.2",)),
        ("dncnn", RESTORATION, DnCNN, 40, 1, ("dncnn.16",)),
        ("srcnn", RESTORATION, SRCNN, 33, 1, ("conv3",)),
        ("fsrcnn", RESTORATION, fsrcnn, 17, 1, ("14",)),
        ("espcn", RESTORATION, ESPCN, 17, 1, ("conv3",)),
        ("edsr_baseline", RESTORATION, partial(EDSR, 16, excited=False), 24, 3, ("tail.4",)),
        ("rcan_block_edsr", RESTORATION, partial(EDSR, 10, excited=True), 24, 3, ("tail.4",)),
        ("style_transfer", RESTORATION, stylising, 64, 3, ("17.1",)),
    )
]
