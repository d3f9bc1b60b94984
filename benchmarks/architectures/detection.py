"""Detection: several scales, several heads."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from architectures.blocks import ResNetTrunk, conv, leaky
from architectures.registry import Architecture, image

FAMILY = "detection"
dark, act = partial(conv, act=leaky), partial(conv, act=nn.SiLU)


class TinyYOLO(nn.Module):
    """YOLO v3-tiny of Redmon and Farhadi 2018: boxes at two scales, as (batch, anchors, rows, columns, numbers)."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        self.numbers = classes + 5
        layers: list[nn.Module] = []
        for inputs, outputs in ((3, 16), (16, 32), (32, 64), (64, 128)):
            layers += [dark(inputs, outputs), nn.MaxPool2d(2)]
        self.early = nn.Sequential(*layers, dark(128, 256))
        self.late = nn.Sequential(
            *(nn.MaxPool2d(2), dark(256, 512), nn.ZeroPad2d((0, 1, 0, 1)), nn.MaxPool2d(2, 1)),
            *(dark(512, 1024), dark(1024, 256, 1)),
        )
        self.coarse = nn.Sequential(dark(256, 512), nn.Conv2d(512, 3 * self.numbers, 1))
        self.lateral, self.upsample = dark(256, 128, 1), nn.Upsample(scale_factor=2)
        self.fine = nn.Sequential(dark(384, 256), nn.Conv2d(256, 3 * self.numbers, 1))

    def forward(self, x: Tensor) -> list[Tensor]:
        early = self.early(x)
        late = self.late(early)
        fine = self.fine(torch.cat([self.upsample(self.lateral(late)), early], 1))
        return [self.arrange(self.coarse(late)), self.arrange(fine)]

    def arrange(self, x: Tensor) -> Tensor:
        batch, _, rows, columns = x.shape
        return x.view(batch, 3, self.numbers, rows, columns).permute(0, 1, 3, 4, 2).contiguous()


class CSP(nn.Module):
    """Wang et al. 2020: one branch through residual blocks, one around them."""

    def __init__(self, inputs: int, outputs: int, repeats: int, *, shortcut: bool = True) -> None:
        super().__init__()
        half = outputs // 2
        self.cv1, self.cv2, self.cv3 = act(inputs, half, 1), act(inputs, half, 1), act(2 * half, outputs, 1)
        self.m = nn.ModuleList(nn.Sequential(act(half, half, 1), act(half, half)) for _ in range(repeats))
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        out = self.cv1(x)
        for block in self.m:
            out = out + block(out) if self.shortcut else block(out)
        return self.cv3(torch.cat((out, self.cv2(x)), dim=1))


class YOLOv5(nn.Module):
    """Size n: CSP blocks, fast pyramid pooling, a top-down and a bottom-up path, three scales."""

    def __init__(self, classes: int = 80) -> None:
        super().__init__()
        stem = (act(3, 16, 6, 2, padding=2), act(16, 32, 3, 2), CSP(32, 32, 1))
        self.stage3 = nn.Sequential(*stem, act(32, 64, 3, 2), CSP(64, 64, 2))
        self.stage4 = nn.Sequential(act(64, 128, 3, 2), CSP(128, 128, 3))
        self.stage5 = nn.Sequential(act(128, 256, 3, 2), CSP(256, 256, 1))
        self.squeeze, self.pool, self.expand = act(256, 128, 1), nn.MaxPool2d(5, 1, 2), act(512, 256, 1)
        self.reduce5, self.up4 = act(256, 128, 1), CSP(256, 128, 1, shortcut=False)
        self.reduce4, self.up3 = act(128, 64, 1), CSP(128, 64, 1, shortcut=False)
        self.down4, self.out4 = act(64, 64, 3, 2), CSP(128, 128, 1, shortcut=False)
        self.down5, self.out5 = act(128, 128, 3, 2), CSP(256, 256, 1, shortcut=False)
        self.detect = nn.ModuleList(nn.Conv2d(width, 3 * (classes + 5), 1) for width in (64, 128, 256))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        c3 = self.stage3(x)
        c4 = self.stage4(c3)
        x = self.squeeze(self.stage5(c4))
        y1 = self.pool(x)
        y2 = self.pool(y1)
        c5 = self.reduce5(self.expand(torch.cat((x, y1, y2, self.pool(y2)), 1)))
        p4 = self.reduce4(self.up4(torch.cat((F.interpolate(c5, scale_factor=2), c4), 1)))
        p3 = self.up3(torch.cat((F.interpolate(p4, scale_factor=2), c3), 1))
        n4 = self.out4(torch.cat((self.down4(p3), p4), 1))
        n5 = self.out5(torch.cat((self.down5(n4), c5), 1))
        return tuple(head(level) for head, level in zip(self.detect, (p3, n4, n5), strict=True))


class SSD(nn.Module):
    """Liu et al. 2016, reduced: boxes and classes from feature maps of decreasing size, concatenated, as a dict."""

    def __init__(self, classes: int = 21, anchors: int = 4) -> None:
        super().__init__()
        self.classes = classes
        self.base = nn.Sequential(*(conv(a, b, 3, 2) for a, b in ((3, 64), (64, 128), (128, 256))))
        self.extras = nn.ModuleList(nn.Sequential(conv(256, 128, 1), conv(128, 256, 3, 2)) for _ in range(2))
        self.loc = nn.ModuleList(nn.Conv2d(256, anchors * 4, 3, padding=1) for _ in range(3))
        self.conf = nn.ModuleList(nn.Conv2d(256, anchors * classes, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        maps = [self.base(x)]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        loc, conf = [], []
        for each, where, what in zip(maps, self.loc, self.conf, strict=True):
            loc.append(where(each).permute(0, 2, 3, 1).contiguous())
            conf.append(what(each).permute(0, 2, 3, 1).contiguous())
        loc = torch.cat([each.view(each.size(0), -1) for each in loc], 1)
        conf = torch.cat([each.view(each.size(0), -1) for each in conf], 1)
        return {"boxes": loc.view(loc.size(0), -1, 4), "scores": conf.view(conf.size(0), -1, self.classes)}


class FPN(nn.Module):
    """Lin et al. 2017: coarse feature maps upsampled and added to finer ones."""

    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(width, 256, 1) for width in (128, 256, 512))
        self.smooth = nn.ModuleList(nn.Conv2d(256, 256, 3, padding=1) for _ in range(3))

    def forward(self, maps: tuple[Tensor, ...]) -> list[Tensor]:
        c3, c4, c5 = (layer(each) for layer, each in zip(self.lateral, maps, strict=True))
        p4 = F.interpolate(c5, size=c4.shape[-2:], mode="nearest") + c4
        p3 = F.interpolate(p4, size=c3.shape[-2:], mode="nearest") + c3
        return [layer(each) for layer, each in zip(self.smooth, (p3, p4, c5), strict=True)]


class PyramidNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.fpn = ResNetTrunk(), FPN()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {f"p{level}": each for level, each in enumerate(self.fpn(self.backbone(x)), start=3)}


class RetinaNet(nn.Module):
    """Lin et al. 2017: the same two heads at every level of the pyramid."""

    def __init__(self, classes: int = 20, anchors: int = 9) -> None:
        super().__init__()
        self.backbone, self.fpn, self.classes = ResNetTrunk(), FPN(), classes
        self.cls_head, self.box_head = self.head(anchors * classes), self.head(anchors * 4)

    @staticmethod
    def head(outputs: int) -> nn.Module:
        plain = (conv(256, 256, norm=None) for _ in range(4))
        return nn.Sequential(*plain, nn.Conv2d(256, outputs, 3, padding=1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        levels = self.fpn(self.backbone(x))
        classes = [self.cls_head(each).permute(0, 2, 3, 1).reshape(x.size(0), -1, self.classes) for each in levels]
        boxes = [self.box_head(each).permute(0, 2, 3, 1).reshape(x.size(0), -1, 4) for each in levels]
        return torch.cat(classes, 1).sigmoid(), torch.cat(boxes, 1)


class CenterNet(nn.Module):
    """Zhou et al. 2019: transposed convolutions to a quarter of the image, a head for every output."""

    def __init__(self, classes: int = 20) -> None:
        super().__init__()
        self.backbone = ResNetTrunk()
        layers: list[nn.Module] = []
        for inputs, outputs in ((512, 256), (256, 128), (128, 64)):
            layers.append(nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.ReLU(True)]
        self.deconv = nn.Sequential(*layers)
        self.heads = {"hm": classes, "wh": 2, "reg": 2}
        for head, outputs in self.heads.items():
            self.__setattr__(head, nn.Sequential(conv(64, 64, norm=None), nn.Conv2d(64, outputs, 1)))

    def forward(self, x: Tensor) -> list[dict[str, Tensor]]:
        x = self.deconv(self.backbone(x)[-1])
        return [{head: self.__getattr__(head)(x) for head in self.heads}]


class RetinaFace(nn.Module):
    """Deng et al. 2020, reduced: context modules, and heads for classes, boxes and landmarks at each level."""

    def __init__(self) -> None:
        super().__init__()
        plain = partial(conv, act=None)
        stages = ((3, 32), (32, 64), (64, 128), (128, 256))
        self.stem = nn.Sequential(*(dark(a, b, 3, 2) for a, b in stages[:3]))
        self.deep = dark(128, 256, 3, 2)
        self.lateral = nn.ModuleList([dark(128, 64, 1), dark(256, 64, 1)])
        self.merge = dark(64, 64)
        self.context = nn.ModuleList(
            nn.ModuleList([plain(64, 32), dark(64, 16), plain(16, 16), dark(16, 16), plain(16, 16)]) for _ in range(2)
        )
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(64, 2 * numbers, 1) for numbers in (2, 4, 10)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        fine = self.stem(x)
        coarse = self.lateral[1](self.deep(fine))
        fine = self.merge(self.lateral[0](fine) + F.interpolate(coarse, size=fine.shape[2:], mode="nearest"))
        found: list[list[Tensor]] = [[], [], []]
        for level, (wide, first, middle, second, narrow), heads in zip(
            (fine, coarse), self.context, self.heads, strict=True
        ):
            start = first(level)
            out = F.relu(torch.cat([wide(level), middle(start), narrow(second(start))], dim=1))
            for at, (head, numbers) in enumerate(zip(heads, (2, 4, 10), strict=True)):
                found[at].append(head(out).permute(0, 2, 3, 1).contiguous().view(x.shape[0], -1, numbers))
        classes, boxes, landmarks = (torch.cat(each, dim=1) for each in found)
        return F.softmax(classes, dim=-1), boxes, landmarks


class PNet(nn.Module):
    """MTCNN of Zhang et al. 2016: PReLU per channel, fully convolutional."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 10, 3), nn.PReLU(10)
        self.pool1 = nn.MaxPool2d(2, 2, ceil_mode=True)
        self.conv2, self.prelu2 = nn.Conv2d(10, 16, 3), nn.PReLU(16)
        self.conv3, self.prelu3 = nn.Conv2d(16, 32, 3), nn.PReLU(32)
        self.conv4_1, self.conv4_2 = nn.Conv2d(32, 2, 1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.pool1(self.prelu1(self.conv1(x)))
        x = self.prelu3(self.conv3(self.prelu2(self.conv2(x))))
        return self.conv4_2(x), F.softmax(self.conv4_1(x), dim=1)


class RNet(nn.Module):
    """The second stage of MTCNN: height and width are transposed before the dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.prelu1 = nn.Conv2d(3, 28, 3), nn.PReLU(28)
        self.conv2, self.prelu2 = nn.Conv2d(28, 48, 3), nn.PReLU(48)
        self.conv3, self.prelu3 = nn.Conv2d(48, 64, 2), nn.PReLU(64)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.dense4, self.prelu4 = nn.Linear(576, 128), nn.PReLU(128)
        self.dense5_1, self.dense5_2 = nn.Linear(128, 2), nn.Linear(128, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.pool(self.prelu2(self.conv2(self.pool(self.prelu1(self.conv1(x))))))
        x = self.prelu3(self.conv3(x)).permute(0, 3, 2, 1).contiguous()
        x = self.prelu4(self.dense4(x.view(x.shape[0], -1)))
        return self.dense5_2(x), F.softmax(self.dense5_1(x), dim=1)


ARCHITECTURES = [
    Architecture(name, FAMILY, make, image(side), outputs)
    for name, make, side, outputs in (
        ("yolo_v3_tiny", TinyYOLO, 96, ("coarse.1", "fine.1")),
        ("yolo_v5n", YOLOv5, 96, ("detect",)),
        ("ssd", SSD, 96, ("loc", "conf")),
        ("fpn_resnet18", PyramidNetwork, 96, ("fpn.smooth",)),
        ("retinanet_resnet18", RetinaNet, 96, ("cls_head.4", "box_head.4")),
        ("centernet_resnet18", CenterNet, 64, ("hm.1", "wh.1", "reg.1")),
        ("retinaface", RetinaFace, 64, ("heads",)),
        ("mtcnn_pnet", PNet, 24, ("conv4_1", "conv4_2")),
        ("mtcnn_rnet", RNet, 24, ("dense5_1", "dense5_2")),
    )
]
