"""Documents: frozen data to JSON and back.

The fields of a dataclass are the schema: msgspec checks every type and every range they declare. A file also has a
format, a version and a digest of its content, so that a changed byte is noticed.
"""

from __future__ import annotations

import hashlib
import math
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from critical_neurons.core.files import write_atomically
from critical_neurons.errors import InvalidFileError

Share: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1)]
Amount: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Number: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]

LARGEST_FILE = 2**29
"""Largest JSON file that is read, in bytes."""

LARGEST_ARRAY = 2**26
"""Most entries of an array in a file."""

_Kind = TypeVar("_Kind")


class Document:
    """A dataclass with its own file format, known by a name and a version."""

    FORMAT: ClassVar[str]
    FORMAT_VERSION: ClassVar[int]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"format": self.FORMAT, "version": self.FORMAT_VERSION, **to_plain(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`; raises ValueError or KeyError on other data."""
        return from_plain(cls, data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write to a JSON file, atomically."""
        write_atomically(path, encode_document(self.to_dict()))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read a file that `save` wrote."""
        return cls._read(path)

    @classmethod
    def _read(cls, path: str | os.PathLike[str], *, trust_edited: bool = False) -> Self:
        """`trust_edited`: accept a file that was edited by hand, whose digest no longer matches."""
        data = _parse(path)
        if not isinstance(data, dict) or data.get("format") != cls.FORMAT:
            raise InvalidFileError(f"{path}: not a file of {cls.FORMAT}.")
        if data.get("version") != cls.FORMAT_VERSION:
            raise InvalidFileError(
                f"{path}: format version {data.get('version')!r}, of another release; this one reads version "
                f"{cls.FORMAT_VERSION}. Write the file again."
            )
        digest = data.pop("digest", None)
        if not trust_edited and digest != digest_content(data):
            raise InvalidFileError(f"{path}: damaged, or changed after it was written (its digest does not match).")
        try:
            found = cls.from_dict(data)
            again = found.to_dict()
            unknown = [name for name, value in data.items() if again.get(name) != value]
        except (KeyError, ValueError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise InvalidFileError(f"{path}: its content is inconsistent ({error}).") from error
        if unknown:
            raise InvalidFileError(f"{path}: has entries that are not known, in {', '.join(unknown)}.")
        return found


def to_plain(value: Any) -> Any:
    """Frozen data as JSON types; numbers that are not finite become None."""
    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=_encode_array))


def from_plain(kind: type[_Kind], data: Any) -> _Kind:
    """The inverse of `to_plain`. A ValueError names the place of data that does not have its declared type."""
    try:
        return msgspec.convert(data, kind, dec_hook=_decode_array)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def encode_document(content: Mapping[str, Any]) -> bytes:
    """The bytes of a file: the content with its digest."""
    return msgspec.json.format(msgspec.json.encode({**content, "digest": digest_content(content)}), indent=1)


def digest_content(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()


def find_format(path: str | os.PathLike[str]) -> str | None:
    """The format that a JSON file declares, if any."""
    data = _parse(path)
    kind = data.get("format") if isinstance(data, dict) else None
    return kind if isinstance(kind, str) else None


def parse_json(content: bytes) -> Any:
    """Parse JSON with finite numbers; raises ValueError on anything else."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from error


def read_file(path: str | os.PathLike[str], largest: int = LARGEST_FILE) -> bytes:
    """The bytes of a regular file; devices and pipes, which may never end, are refused."""
    check_file(path, largest)
    with _refusing(path):
        return Path(path).read_bytes()


def check_file(path: str | os.PathLike[str], largest: float = math.inf) -> None:
    """Raise an `InvalidFileError` unless it is a regular file that memory has room for."""
    with _refusing(path):
        found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise InvalidFileError(f"{path}: not a regular file.")
    if found.st_size > (most := min(largest, find_free_memory())):
        raise InvalidFileError(f"{path}: {found.st_size:,} bytes. Files of up to {most:,} are read here.")


def find_free_memory() -> int:
    """Bytes that can be used without swapping, or all memory, where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@contextmanager
def _refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InvalidFileError(f"{path}: cannot be read ({reason}).") from error


def _parse(path: str | os.PathLike[str]) -> Any:
    content = read_file(path)
    try:
        return parse_json(content)
    except ValueError as error:
        raise InvalidFileError(f"{path}: not a JSON file ({error}).") from error


def pack(units: NDArray[np.int64]) -> list[Any]:
    """An integer array as runs [first, step, count]; a matrix row by row."""
    if units.ndim == 2:
        return [pack(row) for row in units]
    runs: list[list[int]] = []
    for unit in units.tolist():
        if runs:
            first, step, count = runs[-1]
            if count == 1 and unit - first in (0, 1):
                runs[-1] = [first, unit - first, 2]
                continue
            if count > 1 and unit == first + step * count:
                runs[-1][2] += 1
                continue
        runs.append([unit, 0, 1])
    return runs


def unpack(runs: Sequence[Any]) -> NDArray[np.int64]:
    """The inverse of `pack`."""
    if runs and isinstance(runs[0], Sequence) and (not runs[0] or isinstance(runs[0][0], Sequence)):
        return np.stack([unpack(row) for row in runs])
    known = msgspec.convert(runs, list[tuple[int, int, Count]])
    if sum(count for _, _, count in known) > LARGEST_ARRAY:
        raise ValueError(f"an array of more than {LARGEST_ARRAY:,} entries")
    parts = [first + step * np.arange(count) for first, step, count in known]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)


def _encode_array(values: Any) -> Any:
    """Integers as runs; floats as a list, or as their count if all are zero."""
    if not isinstance(values, np.ndarray):
        raise TypeError(f"{type(values).__name__} cannot be written to a file.")
    if values.dtype == np.int64:
        return pack(values)
    return values.tolist() if values.any() else len(values)


def _decode_array(kind: Any, data: Any) -> Any:
    if kind == NDArray[np.int64]:
        return unpack(msgspec.convert(data, list[Any]))
    if kind != NDArray[np.float64]:
        raise TypeError(f"{kind} cannot be read from a file.")
    if isinstance(data, int):
        return np.zeros(msgspec.convert(data, Annotated[int, msgspec.Meta(ge=0, le=LARGEST_ARRAY)]))
    return np.array(msgspec.convert(data, list[float]), dtype=np.float64)
