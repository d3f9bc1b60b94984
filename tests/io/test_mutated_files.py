"""Law: a file with changed bytes gives what it gave before, or one clear error. Nothing else is raised."""

from __future__ import annotations

import io
import os
import random
import shutil
import warnings
import zipfile
from contextlib import suppress

import numpy as np
import pytest

import critical_neurons as cn
from critical_neurons.errors import CriticalNeuronsError, InvalidFileError
from critical_neurons.io.data import load_batch
from tests.io.damage import forge, mutate
from tests.io.loaders import WRITERS

MUTATIONS = 10
MANY = 1500


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("count", [MUTATIONS, pytest.param(MANY, marks=pytest.mark.slow)])
def test_mutated_files(kind, count, tmp_path):
    path, load = WRITERS[kind](tmp_path)
    content, expected = path.read_bytes(), load()
    generator, refused = random.Random(kind), 0
    for _ in range(count):
        path.write_bytes(mutate(content, generator))
        try:
            assert load() == expected
        except CriticalNeuronsError:
            refused += 1
    assert refused > count // 5


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("count", [MUTATIONS, pytest.param(MANY, marks=pytest.mark.slow)])
def test_forged_files(kind, count, tmp_path):
    """Checksums fit, so that what it says is what is judged: it fits together, or there is one clear error."""
    path, load = WRITERS[kind](tmp_path)
    content, generator = path.read_bytes(), random.Random(kind)
    for _ in range(count):
        path.write_bytes(forge(content, generator))
        with suppress(CriticalNeuronsError):
            load()


def test_an_array_that_declares_more_than_it_has(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, inputs=np.zeros((2, 4)), labels=np.zeros(2, dtype=int))
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, part in parts.items():
            archive.writestr(name, part.replace(b"(2, 4)", b"(1099511627776, 4)".ljust(6))[: len(part) + 12])
    with pytest.raises(InvalidFileError, match=r"data\.npz: "):
        load_batch(str(path))


def test_encrypted_entries_are_refused(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, inputs=np.zeros((2, 4)), labels=np.zeros(2, dtype=int))
    content = bytearray(path.read_bytes())
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        place = content.find(signature)
        while place >= 0:
            content[place + at] |= 1
            place = content.find(signature, place + 1)
    path.write_bytes(content)
    with pytest.raises(InvalidFileError, match=r"inputs\.npy is encrypted"):
        load_batch(str(path))


def test_torch_reads_no_more_of_the_directory_than_is_checked(tmp_path):
    """An entry that the directory calls a folder is empty to torch, and whole to zipfile."""
    path, load = WRITERS["torch checkpoint"](tmp_path)
    content, expected = bytearray(path.read_bytes()), load()
    place = content.find(b"PK\x01\x02")
    while place >= 0:
        content[place + 38] |= 0x10  # external attributes
        place = content.find(b"PK\x01\x02", place + 1)
    path.write_bytes(content)
    assert load() == expected


def test_a_checkpoint_with_an_entry_twice_is_refused(tmp_path):
    path, load = WRITERS["torch checkpoint"](tmp_path)
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings(action="ignore"):
        archive.writestr("weights/data/0", bytes(80))
    with pytest.raises(InvalidFileError, match=r"weights/data/0 is in it twice"):
        load()


def make_huge(path):
    with path.open("wb") as file:
        file.truncate(2**42)


def make_bomb(path):
    """A small archive of large entries, of zeros."""
    header = io.BytesIO()
    shape = (2**37, 8)
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", header.getvalue())
        archive.writestr("labels.npy", header.getvalue())
        archive.writestr("archive/data.pkl", bytes(2**24))


NO_FILES = {
    "nothing": lambda path: None,
    "folder": lambda path: path.mkdir(),
    "loop": lambda path: path.symlink_to(path),
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "empty": lambda path: path.touch(),
    "huge": make_huge,
    "bomb": make_bomb,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_no_file_is_refused_at_once(kind, tmp_path):
    path, load = WRITERS[kind](tmp_path)
    for name, make in NO_FILES.items():
        if kind == "training" and name in ("nothing", "loop"):
            continue  # then training begins
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        make(path)
        with pytest.raises(CriticalNeuronsError):
            load()


def test_whose_file_is_named(tmp_path):
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(InvalidFileError, match=r"plan\.json: not a regular file"):
        cn.Plan.load(tmp_path / "plan.json")
