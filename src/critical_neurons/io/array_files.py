"""Array files: `.npz` and `.safetensors` to inputs and labels. A file may come from anywhere: nothing of it runs, and
sizes are checked before memory is taken."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from critical_neurons.core.documents import check_file, find_free_memory
from critical_neurons.errors import InvalidFileError, first_line

INPUTS, LABELS = "inputs", "labels"

ENCRYPTED = 1
"""Bit of a zip entry's flags."""


def read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise InvalidFileError(f"{path}: no such file of data.")
    check_file(path)
    try:
        return _read_npz(path) if path.suffix == ".npz" else _read_safetensors(path)
    except InvalidFileError:
        raise
    except Exception as error:  # damaged files make the libraries raise nearly anything
        raise InvalidFileError(
            f"{path}: is no {path.suffix} file, or a damaged one ({first_line(error)})."
        ) from error


def _read_npz(path: Path) -> dict[str, NDArray[Any]]:
    if not zipfile.is_zipfile(path):
        raise InvalidFileError(f"{path}: is no .npz file; expected np.savez(path, inputs=..., labels=...).")
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
        return _pick(path, names, lambda name: _read_npy(path, archive, f"{name}.npy"))


def _read_npy(path: Path, archive: zipfile.ZipFile, name: str) -> NDArray[Any]:
    """Like `np.load`, after checking that the declared size is in the file and fits into memory."""
    info = archive.getinfo(name)
    if info.flag_bits & ENCRYPTED:
        raise InvalidFileError(f"{path}: {name} is encrypted. Write the file without a password.")
    with archive.open(info) as file:
        version = np.lib.format.read_magic(file)
        read_header = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, column_first, kind = read_header(file)
        size = math.prod(shape) * kind.itemsize
        if kind.hasobject:
            raise InvalidFileError(
                f"{path}: {name} holds Python objects, which can run code when loaded. Give numbers."
            )
        if size != info.file_size - file.tell():
            raise InvalidFileError(
                f"{path}: {name} declares {size:,} bytes and has {info.file_size - file.tell():,}."
            )
        if 2 * size > (memory := find_free_memory()):  # as it is read, and as it is used
            raise InvalidFileError(f"{path}: {name} has {size:,} bytes, and {memory:,} of memory are free.")
        flat = np.frombuffer(file.read(size), dtype=kind)
    return flat.reshape(shape, order="F" if column_first else "C")


def _read_safetensors(path: Path) -> dict[str, NDArray[Any]]:
    with safe_open(path, "np") as content:
        return _pick(path, content.keys(), content.get_tensor)


def _pick(path: Path, names: Sequence[str], read: Callable[[str], NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Inputs, one or several by name, and labels if there are any; other arrays are not read."""
    inputs = [INPUTS] if INPUTS in names else [name for name in names if name.startswith(f"{INPUTS}.")]
    if not inputs:
        found = ", ".join(names) or "nothing"
        raise InvalidFileError(
            f"{path}: no inputs in it. Found {found}; expected inputs, or inputs.NAME for each of several, and "
            "labels, if there are any."
        )
    return {name: read(name) for name in (*inputs, *({LABELS} & {*names}))}
