"""Signals: audio, biosignals, sensors, video."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from architectures.blocks import conv
from architectures.registry import Architecture, image, vector

FAMILY = "signals and video"


class Block1d(nn.Module):
    """Hannun et al. 2019, ECG: kernels of 15, the shortcut is pooled and zero-padded in channels."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(inputs, outputs, 15, stride, 7, bias=False)
        self.bn1 = nn.BatchNorm1d(outputs)
        self.conv2 = nn.Conv1d(outputs, outputs, 15, 1, 7, bias=False)
        self.bn2 = nn.BatchNorm1d(outputs)
        self.dropout = nn.Dropout(0.2)
        self.stride, self.missing = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.dropout(F.relu(self.bn1(self.conv1(x))))
        out = self.bn2(self.conv2(out))
        identity = F.max_pool1d(x, self.stride) if self.stride > 1 else x
        if self.missing:
            zeros = torch.zeros(x.shape[0], self.missing, identity.shape[2], device=x.device)
            identity = torch.cat((identity, zeros), 1)
        return F.relu(out + identity)


class ECGResNet(nn.Module):
    def __init__(self, leads: int = 12) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv1d(leads, 32, 15, 1, 7, bias=False), nn.BatchNorm1d(32), nn.ReLU())
        sizes = ((32, 32, 1), (32, 32, 2), (32, 64, 1), (64, 64, 2), (64, 128, 1), (128, 128, 2))
        self.blocks = nn.ModuleList(Block1d(*size) for size in sizes)
        self.fc = nn.Linear(128, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean(-1))


class M5(nn.Module):
    """Dai et al. 2017, raw audio; as in PyTorch's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.pool1 = nn.Conv1d(1, 32, 80, 16), nn.BatchNorm1d(32), nn.MaxPool1d(4)
        self.conv2, self.bn2, self.pool2 = nn.Conv1d(32, 32, 3), nn.BatchNorm1d(32), nn.MaxPool1d(4)
        self.conv3, self.bn3, self.pool3 = nn.Conv1d(32, 64, 3), nn.BatchNorm1d(64), nn.MaxPool1d(4)
        self.conv4, self.bn4, self.pool4 = nn.Conv1d(64, 64, 3), nn.BatchNorm1d(64), nn.MaxPool1d(4)
        self.fc1 = nn.Linear(64, 35)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(F.relu(self.bn1(self.conv1(x))))
        x = self.pool2(F.relu(self.bn2(self.conv2(x))))
        x = self.pool3(F.relu(self.bn3(self.conv3(x))))
        x = self.pool4(F.relu(self.bn4(self.conv4(x))))
        x = F.avg_pool1d(x, x.shape[-1]).permute(0, 2, 1)
        return F.log_softmax(self.fc1(x), dim=2)


class TemporalBlock(nn.Module):
    """Bai et al. 2018: dilated convolutions with weight norm, made causal by padding and cropping on the right."""

    def __init__(self, inputs: int, outputs: int, dilation: int) -> None:
        super().__init__()
        self.padding = 2 * dilation
        self.conv1 = weight_norm(nn.Conv1d(inputs, outputs, 3, padding=self.padding, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(outputs, outputs, 3, padding=self.padding, dilation=dilation))
        self.downsample = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.conv1(x)[:, :, : -self.padding].contiguous())
        out = F.relu(self.conv2(out)[:, :, : -self.padding].contiguous())
        return F.relu(out + (x if self.downsample is None else self.downsample(x)))


class TCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(*(TemporalBlock(25 if at else 1, 25, 2**at) for at in range(6)))
        self.linear = nn.Linear(25, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.network(x)[:, :, -1])


class WaveNet(nn.Module):
    """Van den Oord et al. 2016: gated activations (tanh times sigmoid), residual and skip connections."""

    def __init__(self, width: int = 64, layers: int = 10) -> None:
        super().__init__()
        self.causal = nn.Conv1d(1, width, 1)
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2 ** (at % 5)) for at in range(layers))
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 2, dilation=2 ** (at % 5)) for at in range(layers))
        self.residual = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers - 1))
        self.skip = nn.ModuleList(nn.Conv1d(width, 128, 1) for _ in range(layers))
        self.end1, self.end2 = nn.Conv1d(128, 128, 1), nn.Conv1d(128, 256, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.causal(x)
        skips = 0
        for at in range(len(self.filters)):
            padded = F.pad(x, (2 ** (at % 5), 0))
            out = torch.tanh(self.filters[at](padded)) * torch.sigmoid(self.gates[at](padded))
            skips = skips + self.skip[at](out)
            if at < len(self.residual):
                x = x + self.residual[at](out)
        return self.end2(F.relu(self.end1(F.relu(skips))))


class DSCNN(nn.Module):
    """Zhang et al. 2018, keyword spotting: a wide first kernel, depthwise separable layers."""

    def __init__(self) -> None:
        super().__init__()
        wide = nn.Conv2d(1, 64, (10, 4), (2, 2), (5, 1), bias=False)
        layers: list[nn.Module] = [wide, nn.BatchNorm2d(64), nn.ReLU()]
        for _ in range(4):
            layers += [conv(64, 64, 3, groups=64), conv(64, 64, 1)]
        self.features = nn.Sequential(*layers)
        self.fc = nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.fc(F.avg_pool2d(x, x.shape[2:]).view(-1, 64))


class CRNN(nn.Module):
    """Shi et al. 2017, text recognition: columns are the time steps of a bidirectional LSTM."""

    def __init__(self, classes: int = 37) -> None:
        super().__init__()
        tall, plain = nn.MaxPool2d((2, 2), (2, 1), (0, 1)), {"norm": None}
        self.cnn = nn.Sequential(
            *(conv(1, 64, **plain), nn.MaxPool2d(2), conv(64, 128, **plain), nn.MaxPool2d(2)),
            *(conv(128, 256), conv(256, 256, **plain), tall, conv(256, 512), conv(512, 512, **plain), tall),
            conv(512, 512, 2, padding=0),
        )
        self.rnn = nn.LSTM(512, 256, bidirectional=True)
        self.embedding = nn.Linear(512, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cnn(x)
        assert x.size(2) == 1, "the height must have become 1"
        x, _ = self.rnn(x.squeeze(2).permute(2, 0, 1))
        steps, batch, width = x.size()
        return self.embedding(x.view(steps * batch, width)).view(steps, batch, -1)


class EEGNet(nn.Module):
    """Lawhern et al. 2018: temporal, depthwise spatial (electrodes) and separable temporal convolutions; ELU."""

    def __init__(self, electrodes: int = 22) -> None:
        super().__init__()
        self.temporal = nn.Conv2d(1, 8, (1, 64), padding="same", bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.spatial = nn.Conv2d(8, 16, (electrodes, 1), groups=8, bias=False)
        self.bn2 = nn.BatchNorm2d(16)
        self.depthwise = nn.Conv2d(16, 16, (1, 16), padding="same", groups=16, bias=False)
        self.pointwise = nn.Conv2d(16, 16, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16 * 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.temporal(x[:, None]))
        x = F.avg_pool2d(F.elu(self.bn2(self.spatial(x))), (1, 4))
        x = F.avg_pool2d(F.elu(self.bn3(self.pointwise(self.depthwise(x)))), (1, 8))
        return self.fc(F.dropout(x, 0.5, self.training).flatten(1))


class DeepConvLSTM(nn.Module):
    """Ordóñez and Roggen 2016, wearable sensors: temporal convolutions, two LSTM layers, last step classified."""

    def __init__(self, sensors: int = 9) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(64 if at else 1, 64, (5, 1)) for at in range(4))
        self.lstm = nn.LSTM(64 * sensors, 128, num_layers=2, batch_first=True)
        self.fc = nn.Linear(128, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        for layer in self.convs:
            x = F.relu(layer(x))
        x = x.permute(0, 2, 1, 3).reshape(x.size(0), x.size(2), -1)
        out, _ = self.lstm(x)
        return self.fc(out[:, -1, :])


class C3D(nn.Module):
    """Tran et al. 2015 for clips of 16 frames of 32x32, at a quarter of the width."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv3d(3, 16, 3, padding=1), nn.Conv3d(16, 32, 3, padding=1)
        self.conv3a, self.conv3b = nn.Conv3d(32, 64, 3, padding=1), nn.Conv3d(64, 64, 3, padding=1)
        self.conv4a, self.conv4b = nn.Conv3d(64, 128, 3, padding=1), nn.Conv3d(128, 128, 3, padding=1)
        self.pool1, self.pool = nn.MaxPool3d((1, 2, 2)), nn.MaxPool3d(2)
        self.fc6, self.fc7 = nn.Linear(128 * 2 * 2 * 2, 512), nn.Linear(512, 101)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool1(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.pool(self.relu(self.conv3b(self.relu(self.conv3a(x)))))
        x = self.pool(self.relu(self.conv4b(self.relu(self.conv4a(x)))))
        return self.fc7(self.relu(self.fc6(x.view(-1, 1024))))


ARCHITECTURES = [
    Architecture(name, FAMILY, make, inputs, (output,))
    for name, make, inputs, output in (
        ("ecg_resnet1d", ECGResNet, vector(12, 1000), "fc"),
        ("m5_audio", M5, vector(1, 8000), "fc1"),
        ("tcn", TCN, vector(1, 784), "linear"),
        ("wavenet", WaveNet, vector(1, 256), "end2"),
        ("ds_cnn_keywords", DSCNN, lambda: image(49, 1)()[..., :10], "fc"),
        ("crnn", CRNN, vector(1, 32, 100), "embedding"),
        ("eegnet", EEGNet, vector(22, 256), "fc"),
        ("deep_conv_lstm", DeepConvLSTM, vector(64, 9), "fc"),
        ("c3d", C3D, vector(3, 16, 32, 32), "fc7"),
    )
]
