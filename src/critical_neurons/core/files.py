"""Files: outputs are checked before the work that fills them, and written atomically."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from critical_neurons.errors import OutputError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `OutputError` unless a file can be written at `path`. An existing file is not changed."""
    target = _resolve(path)
    with _refusing(path):
        if target.is_dir():
            raise OutputError(f"{path}: is a directory. Give the path of a file in it.")
        if target.exists() and not target.is_file():
            raise OutputError(f"{path}: exists and is not a regular file.")
        _check_parent(path, target)


def write_atomically(
    path: str | os.PathLike[str], content: bytes, check: Callable[[Path], None] | None = None
) -> None:
    """Write `content` to a file beside `path`, then move it there: a reader never sees half of it.

    `check` is shown the file before it is moved; what it raises leaves everything as it was.
    """
    check_writable(path)
    target = _resolve(path)
    draft = _beside(target)
    try:
        with _refusing(path):
            _write_through(draft, content)
        if check is not None:
            check(draft)
        with _refusing(path):
            if target.exists():
                shutil.copymode(target, draft)
            draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def make_folder(path: str | os.PathLike[str]) -> Path:
    """The folder at `path`, created with its parents if needed."""
    target = _resolve(path)
    with _refusing(path):
        target.mkdir(parents=True, exist_ok=True)
    return target


def check_folder(path: str | os.PathLike[str], names: Collection[str], *, overwrite: bool) -> None:
    """Raise `OutputError` unless a folder of files with these names can be made at `path`.

    Nothing may be there, or an empty folder; with `overwrite` also a folder that holds such files and no others.
    """
    target = _resolve(path)
    with _refusing(path):
        if target.exists() and not target.is_dir():
            raise OutputError(f"{path}: is a file. Give the path of a folder.")
        _check_parent(path, target)
        found = sorted(os.listdir(target)) if target.exists() else []
    others = [name for name in found if name not in names]
    if others:
        raise OutputError(
            f"{path}: holds other files ({', '.join(others[:3])}{', ...' if len(others) > 3 else ''}), which stay as "
            "they are. Give a new folder."
        )
    if found and not overwrite:
        raise OutputError(
            f"{path}: exists and is not empty. Give a new folder, or say overwrite=True (--overwrite) to replace it."
        )


def write_folder(
    path: str | os.PathLike[str], files: Mapping[str, bytes], *, overwrite: bool = False, known: Collection[str] = ()
) -> None:
    """Make a folder of these files beside `path`, then move it there. If that fails, the old folder is put back.
    Where the system can exchange two folders (Linux), there is one at every moment, whatever ends the process.

    With `overwrite` an existing folder may also hold files with one of the `known` names, which are removed.
    """
    check_folder(path, {*files, *known}, overwrite=overwrite)
    target = _resolve(path)
    draft, old = _beside(target), _beside(target)
    try:
        with _refusing(path):
            draft.mkdir()
            for name, content in files.items():
                _write_through(draft / name, content)
            if target.exists():
                shutil.copymode(target, draft)
                if overwrite and _exchange(draft, target):
                    return
                if overwrite:
                    target.rename(old)
                else:
                    target.rmdir()  # refused if another run has filled it meanwhile
            draft.rename(target)
    finally:
        if old.exists() and not target.exists():
            old.rename(target)
        for leftover in (draft, old):
            shutil.rmtree(leftover, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; False if the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform == "linux" else None
    here, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of linux/fcntl.h and linux/fs.h
    return call is not None and call(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0


def _write_through(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _resolve(path: str | os.PathLike[str]) -> Path:
    """The file behind symbolic links: writing to a link must not replace it."""
    return Path(os.path.realpath(path))


def _beside(target: Path) -> Path:
    """An unused name in the same directory, so that moving the file is atomic."""
    return target.with_name(f".{secrets.token_hex(8)}.part")


def _check_parent(path: str | os.PathLike[str], target: Path) -> None:
    """Raise unless a file can be created beside `target`."""
    if not target.parent.exists():
        raise OutputError(f"{path}: the directory {target.parent} does not exist. Create it first.")
    if not target.parent.is_dir():
        raise OutputError(f"{path}: {target.parent} is not a directory.")
    probe = _beside(target)
    try:
        probe.touch(exist_ok=False)
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the operating system into an `OutputError` with the user's path."""
    try:
        yield
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror or error}).") from error
