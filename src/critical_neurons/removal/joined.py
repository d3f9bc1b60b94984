"""Tensors that come one after the other to one tensor: in memory while they are few, else in a temporary file."""

from __future__ import annotations

import tempfile
from typing import IO

import numpy as np
import torch
from torch import Tensor

from critical_neurons.errors import InvalidInputError

MOST_BYTES = 2**28
"""Held in memory. The rows of a file are read when they are asked for, and the system may forget them again."""


class Joined:
    """Joins along the first axis. The file has no name and is gone with the tensor."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._file: IO[bytes] | None = None
        self._bytes = self._rows = 0

    def add(self, values: Tensor) -> None:
        if self._parts and values.dtype != self._parts[0].dtype:
            raise InvalidInputError(
                f"inputs: found batches of {self._parts[0].dtype} and {values.dtype}. Give all of them in one type."
            )
        self._rows += len(values)
        self._bytes += values.numel() * values.element_size()
        if self._file is None:
            self._parts.append(values)
            if self._bytes > MOST_BYTES:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115, which the tensor keeps open
                for part in self._parts:
                    self._write(part)
                del self._parts[1:]
        else:
            self._write(values)

    def _write(self, values: Tensor) -> None:
        assert self._file is not None
        plain = values.to("cpu", self._parts[0].dtype).contiguous()
        self._file.write(plain.flatten().view(torch.uint8).numpy().tobytes())

    def finish(self) -> Tensor:
        if self._file is None:
            return torch.cat(self._parts)
        self._file.flush()
        mapped = np.memmap(self._file, np.uint8, mode="c")  # what is written into it stays out of the file
        first = self._parts[0]
        return torch.from_numpy(mapped).view(first.dtype).reshape(self._rows, *first.shape[1:])
