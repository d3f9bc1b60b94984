"""Joined: batches concatenated to one tensor, in a memory-mapped temporary file if they are large."""

from __future__ import annotations

import tempfile
from typing import IO

import numpy as np
import torch
from torch import Tensor

from critical_neurons.errors import InvalidInputError

MOST_BYTES = 2**28
"""Above this size a file is used, whose rows the operating system reads when needed and may drop again."""


class Joined:
    """Concatenates along the first axis. The file has no name and vanishes with the tensor."""

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
        mapped = np.memmap(self._file, np.uint8, mode="c")  # copy on write: changes do not reach the file
        first = self._parts[0]
        return torch.from_numpy(mapped).view(first.dtype).reshape(self._rows, *first.shape[1:])
