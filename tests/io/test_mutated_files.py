"""Law: a file with changed bytes gives what it gave before, or one clear error. Nothing else is raised."""

from __future__ import annotations

import os
import random
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import CriticalNeuronsError, InvalidFileError
from critical_neurons.io.data import load_batch
from critical_neurons.io.models import load_model
from critical_neurons_reproduction.store import Cell, Store
from tests.core.test_comparison import make as make_comparison
from tests.drawing import draw_plan, draw_scores
from tests.zoo import share_case

NAME = "nest"
MUTATIONS = 40
MANY = 1500


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def write_plan(folder):
    path = folder / "plan.json"
    draw_plan(share_case(NAME).network.structure).save(path)
    return path, lambda: cn.Plan.load(path).to_dict()


def write_scores(folder):
    path = folder / "scores.json"
    draw_scores(NAME).save(path)
    return path, lambda: cn.Scores.load(path).to_dict()


def write_comparison(folder):
    path = folder / "comparison.json"
    make_comparison().save(path)
    return path, lambda: cn.Comparison.load(path).to_dict()


def write_checkpoint(name):
    def write(folder):
        inputs = torch.rand(3, 4)
        plan = draw_plan(cn.inspect(build(), inputs), seed=1)
        cn.save(cn.prune(build(), plan, inputs), folder / "smaller", plan=plan)
        values = lambda: [each.tolist() for each in cn.load(folder / "smaller", build).parameters()]  # noqa: E731
        return folder / "smaller" / name, values

    return write


def write_line(folder):
    path = folder / "table.jsonl"
    Store(folder).add(Cell("table", "fc3", {"seed": 0}), {"accuracy": 0.9})
    return path, lambda: [record.result for record in Store(folder).find_all("table")] or refuse()


def refuse():
    raise InvalidFileError("no result is left.")


def write_npz(folder):
    path = folder / "data.npz"
    np.savez_compressed(path, inputs=np.random.default_rng(0).random((6, 4)), labels=np.arange(6))
    return path, lambda: load_batch(str(path)) and None


def write_tensors(folder):
    path = folder / "data.safetensors"
    save_file({"inputs": torch.rand(6, 4), "labels": torch.arange(6)}, path)
    return path, lambda: load_batch(str(path)) and None


def write_weights(folder):
    path = folder / "weights.pt"
    torch.save(build().state_dict(), path)
    return path, lambda: load_model(f"{__name__}:build", path) and None


WRITERS = {
    "plan": write_plan,
    "scores": write_scores,
    "comparison": write_comparison,
    "plan of a folder": write_checkpoint("plan.json"),
    "provenance of a folder": write_checkpoint("provenance.json"),
    "weights of a folder": write_checkpoint("model.safetensors"),
    "results line": write_line,
    "npz": write_npz,
    "safetensors": write_tensors,
    "torch checkpoint": write_weights,
}


def mutate(content, generator):
    """One to four bytes changed, inserted, removed, or a piece of the file repeated, cut out or moved."""
    changed = bytearray(content)
    for _ in range(generator.randint(1, 4)):
        at, length = generator.randrange(len(changed) or 1), generator.choice([1, 1, 1, 4, 64])
        piece = changed[at : at + length]
        match generator.randrange(5):
            case 0:
                changed[at : at + length] = generator.randbytes(len(piece))
            case 1:
                changed[at:at] = generator.choice([piece, b"0", b"-", b"1e9", b"[", b'"', b"\xff"])
            case 2:
                del changed[at : at + length]
            case 3:
                elsewhere = generator.randrange(len(changed) or 1)
                changed[elsewhere:elsewhere] = piece
            case 4:
                del changed[at : None if length == 64 else at + 1]
    return bytes(changed)


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
    assert refused > count // 4


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
