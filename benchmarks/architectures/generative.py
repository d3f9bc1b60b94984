"""Autoencoders, adversarial networks and diffusion."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from architectures.registry import BATCH, Architecture, Inputs, image, vector

FAMILY = "generative"


def conv_autoencoder() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 7)),
        *(nn.ConvTranspose2d(64, 32, 7), nn.ReLU(), nn.ConvTranspose2d(32, 16, 3, 2, 1, output_padding=1), nn.ReLU()),
        *(nn.ConvTranspose2d(16, 1, 3, 2, 1, output_padding=1), nn.Sigmoid()),
    )


class TiedAutoencoder(nn.Module):
    """The decoder uses the transposed weights of the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(256, 784) * 0.03)
        self.weight2 = nn.Parameter(torch.randn(64, 256) * 0.05)
        self.bias1, self.bias2 = nn.Parameter(torch.zeros(256)), nn.Parameter(torch.zeros(64))
        self.bias3, self.bias4 = nn.Parameter(torch.zeros(256)), nn.Parameter(torch.zeros(784))

    def forward(self, x: Tensor) -> Tensor:
        code = F.linear(torch.sigmoid(F.linear(x.view(-1, 784), self.weight1, self.bias1)), self.weight2, self.bias2)
        out = torch.sigmoid(F.linear(code, self.weight2.t(), self.bias3))
        return torch.sigmoid(F.linear(out, self.weight1.t(), self.bias4))


class VAE(nn.Module):
    """PyTorch's example of Kingma and Welling 2014; in evaluation mode the mean is decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(784, 400), nn.Linear(400, 20), nn.Linear(400, 20)
        self.fc3, self.fc4 = nn.Linear(20, 400), nn.Linear(400, 784)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x.view(-1, 784)))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar) if self.training else mu
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


class ConvVAE(nn.Module):
    """Four strided convolutions, a latent code of 128, and a mirrored decoder; returns a list."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256)) -> None:
        super().__init__()
        layers, inputs = [], 3
        for outputs in widths:
            layers += [nn.Conv2d(inputs, outputs, 3, 2, 1), nn.BatchNorm2d(outputs), nn.LeakyReLU()]
            inputs = outputs
        self.encoder = nn.Sequential(*layers)
        self.fc_mu, self.fc_var = nn.Linear(256 * 4, 128), nn.Linear(256 * 4, 128)
        self.decoder_input = nn.Linear(128, 256 * 4)
        layers = []
        for outputs in (128, 64, 32, 32):
            layers += [nn.ConvTranspose2d(inputs, outputs, 3, 2, 1, 1), nn.BatchNorm2d(outputs), nn.LeakyReLU()]
            inputs = outputs
        self.decoder = nn.Sequential(*layers, nn.Conv2d(32, 3, 3, padding=1), nn.Tanh())

    def forward(self, x: Tensor) -> list[Tensor]:
        hidden = torch.flatten(self.encoder(x), start_dim=1)
        mu, log_var = self.fc_mu(hidden), self.fc_var(hidden)
        z = mu
        if self.training:
            z = mu + torch.exp(0.5 * log_var) * torch.randn_like(mu)
        return [self.decoder(self.decoder_input(z).view(-1, 256, 2, 2)), mu, log_var]


def dcgan_generator() -> nn.Module:
    """Radford et al. 2016: a latent vector of 100 to an image of 64x64."""
    layers: list[nn.Module] = []
    inputs = 100
    for at, outputs in enumerate((512, 256, 128, 64)):
        stride, padding = (1, 0) if at == 0 else (2, 1)
        layers.append(nn.ConvTranspose2d(inputs, outputs, 4, stride, padding, bias=False))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(True)]
        inputs = outputs
    return nn.Sequential(*layers, nn.ConvTranspose2d(64, 3, 4, 2, 1, bias=False), nn.Tanh())


class DCGANDiscriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
        for inputs, outputs in ((64, 128), (128, 256), (256, 512)):
            layers.append(nn.Conv2d(inputs, outputs, 4, 2, 1, bias=False))
            layers += [nn.BatchNorm2d(outputs), nn.LeakyReLU(0.2, inplace=True)]
        self.main = nn.Sequential(*layers, nn.Conv2d(512, 1, 4, 1, 0, bias=False), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x).view(-1, 1).squeeze(1)


class SpectralDiscriminator(nn.Module):
    """Miyato et al. 2018: every weight divided by its largest singular value."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 64, 3, 1), (64, 64, 4, 2), (64, 128, 3, 1), (128, 128, 4, 2), (128, 256, 3, 1), (256, 256, 4, 2))
        self.convs = nn.ModuleList(spectral_norm(nn.Conv2d(*size, padding=1)) for size in sizes)
        self.fc = spectral_norm(nn.Linear(4 * 4 * 256, 1))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = F.leaky_relu(conv(x), 0.1)
        return self.fc(x.view(-1, 4 * 4 * 256))


class ConditionalGenerator(nn.Module):
    """Mirza and Osindero 2014: noise and the embedded label, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.label_emb = nn.Embedding(10, 10)
        layers: list[nn.Module] = [nn.Linear(110, 128), nn.LeakyReLU(0.2, inplace=True)]
        for inputs, outputs in ((128, 256), (256, 512), (512, 1024)):
            layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs, 0.8), nn.LeakyReLU(0.2, inplace=True)]
        self.model = nn.Sequential(*layers, nn.Linear(1024, 1024), nn.Tanh())

    def forward(self, noise: Tensor, labels: Tensor) -> Tensor:
        x = self.model(torch.cat((self.label_emb(labels), noise), -1))
        return x.view(x.size(0), *(1, 32, 32))


class SkipBlock(nn.Module):
    """pix2pix (Isola et al. 2017): a U-Net of nested blocks."""

    def __init__(self, outer: int, inner: int, inside: nn.Module | None, inputs: int | None = None) -> None:
        super().__init__()
        self.outermost = inputs is not None
        down = nn.Conv2d(inputs or outer, inner, 4, 2, 1, bias=False)
        up = nn.ConvTranspose2d(inner if inside is None else 2 * inner, outer, 4, 2, 1, bias=self.outermost)
        if inputs is not None:
            layers = [down, inside, nn.ReLU(True), up, nn.Tanh()]
        elif inside is None:
            layers = [nn.LeakyReLU(0.2, True), down, nn.ReLU(True), up, nn.BatchNorm2d(outer)]
        else:
            layers = [nn.LeakyReLU(0.2, True), down, nn.BatchNorm2d(inner), inside]
            layers += [nn.ReLU(True), up, nn.BatchNorm2d(outer), nn.Dropout(0.5)]
        self.model = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.outermost:
            return self.model(x)
        # the first layer works in place, so x is already activated here
        return torch.cat([x, self.model(x)], 1)


def pix2pix_generator() -> nn.Module:
    block = SkipBlock(512, 512, None)
    for outer, inner in ((512, 512), (256, 512), (128, 256), (64, 128)):
        block = SkipBlock(outer, inner, block)
    return SkipBlock(3, 64, block, inputs=3)


def patch_discriminator() -> nn.Module:
    """The discriminator of pix2pix, with instance normalisation: one logit per patch."""
    layers: list[nn.Module] = [nn.Conv2d(6, 64, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    for inputs, outputs, stride in ((64, 128, 2), (128, 256, 2), (256, 512, 1)):
        layers += [nn.Conv2d(inputs, outputs, 4, stride, 1), nn.InstanceNorm2d(outputs), nn.LeakyReLU(0.2, True)]
    return nn.Sequential(*layers, nn.Conv2d(512, 1, 4, 1, 1))


class TimedBlock(nn.Module):
    """A residual block with group norm and SiLU, conditioned on the time step."""

    def __init__(self, inputs: int, outputs: int, time: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(time, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        out = self.conv1(F.silu(self.norm1(x)))
        out = out + self.time(F.silu(time))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(out))) + self.skip(x)


class DiffusionUNet(nn.Module):
    """Ho et al. 2020, reduced: image and time step to noise."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 4 * width))
        block = partial(TimedBlock, time=4 * width)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down1, self.down2 = block(width, width), block(width, 2 * width)
        self.shrink1, self.shrink2 = nn.Conv2d(width, width, 3, 2, 1), nn.Conv2d(2 * width, 2 * width, 3, 2, 1)
        self.middle = block(2 * width, 2 * width)
        self.up2, self.up1 = block(4 * width, width), block(2 * width, width)
        self.norm, self.last = nn.GroupNorm(8, width), nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        rate = torch.exp(-math.log(10000) * torch.arange(self.width // 2, device=x.device) / (self.width // 2))
        angles = t[:, None].float() * rate[None]
        time = self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))
        first = self.down1(self.first(x), time)
        second = self.down2(self.shrink1(first), time)
        x = self.middle(self.shrink2(second), time)
        x = self.up2(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), second], 1), time)
        x = self.up1(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), first], 1), time)
        return self.last(F.silu(self.norm(x)))


def noise_and_labels() -> Inputs:
    return torch.randn(BATCH, 100), torch.randint(10, (BATCH,))


def image_and_time() -> Inputs:
    return torch.randn(BATCH, 3, 32, 32), torch.randint(1000, (BATCH,))


ARCHITECTURES = [
    Architecture(name, FAMILY, make, inputs, outputs)
    for name, make, inputs, outputs in (
        ("conv_autoencoder", conv_autoencoder, image(28, 1), ("9",)),
        ("tied_autoencoder", TiedAutoencoder, image(28, 1), ("bias4",)),
        ("vae", VAE, image(28, 1), ("fc21", "fc22", "fc4")),
        ("conv_vae", ConvVAE, image(32), ("fc_mu", "fc_var", "decoder.12")),
        ("dcgan_generator", dcgan_generator, vector(100, 1, 1), ("12",)),
        ("dcgan_discriminator", DCGANDiscriminator, image(64), ("main.11",)),
        ("spectral_norm_discriminator", SpectralDiscriminator, image(32), ("fc",)),
        ("conditional_gan_generator", ConditionalGenerator, noise_and_labels, ("model.11",)),
        ("pix2pix_generator", pix2pix_generator, image(64), ("model.3",)),
        ("patch_discriminator", patch_discriminator, image(64, 6), ("11",)),
        ("diffusion_unet", DiffusionUNet, image_and_time, ("last",)),
    )
]
