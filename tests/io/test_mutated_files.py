"""Law: a file with changed bytes gives what it gave before, or one clear error. Nothing else is raised."""

from __future__ import annotations

import os
import random
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


@pytest.mark.parametrize("make", [lambda path: path.mkdir(), lambda path: path.symlink_to(path)])
def test_what_is_no_file(make, tmp_path):
    path = tmp_path / "plan.json"
    make(path)
    with pytest.raises(InvalidFileError, match=r"plan\.json: (not a regular file|cannot be read)"):
        cn.Plan.load(path)


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "plan.json")
    with pytest.raises(InvalidFileError, match="not a regular file"):
        cn.Plan.load(tmp_path / "plan.json")
