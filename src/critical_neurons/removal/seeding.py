"""Seeding: a fixed seed for some code, with torch's random state restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def seeded(seed: int, *models: nn.Module) -> Iterator[None]:
    """Seeds the generators of the CPU and of the GPUs that the models are on; other GPUs are not touched."""
    tensors = chain.from_iterable((*model.parameters(), *model.buffers()) for model in models)
    devices = sorted({values.get_device() for values in tensors if values.is_cuda})
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
