"""Law: a smaller network that is saved and loaded, or exported, is the same function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import critical_neurons as cn
from critical_neurons.io.exporters import EXPORT_TOLERANCE
from critical_neurons.removal.rows import find_tensors, match_model
from tests.any_models import ANY, build_any, halve, make_inputs, run
from tests.drawing import draw_scores
from tests.zoo import ZOO, share_case

EXPORTED = ["resnet"]
"""Exporters take seconds for each network, so most of the zoo is left to the slow tests."""

EVERY = [name if name in EXPORTED else pytest.param(name, marks=pytest.mark.slow) for name in ZOO]


@cache
def make_smaller(name: str) -> tuple[nn.Module, cn.Plan, Tensor]:
    """Half of the units removed at random."""
    case = share_case(name)
    plan = cn.plan(draw_scores(name), units=0.5)
    return cn.prune(case.model, plan, case.inputs), plan, torch.from_numpy(case.inputs)


@pytest.mark.parametrize("name", ZOO)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    smaller, plan, inputs = make_smaller(name)
    cn.save(smaller, tmp_path / "out", plan=plan)
    loaded = cn.load(tmp_path / "out", ZOO[name].build)
    assert repr(loaded) == repr(smaller)
    assert plan.removed
    with torch.no_grad():
        assert torch.equal(loaded(inputs), smaller(inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ANY)
def test_anything_saved_and_loaded(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whatever a model takes and gives, and whatever of it is sliced."""
    model, inputs = build_any(name), make_inputs(name)
    plan = halve(model, inputs)
    smaller = cn.prune(model, plan, inputs).to(dtype)
    cn.save(smaller, tmp_path / "out", plan=plan)
    loaded = cn.load(tmp_path / "out", lambda: build_any(name, seed=7))
    assert repr(loaded) == repr(smaller)
    assert plan.removed
    rows = match_model(inputs, smaller)
    pairs = list(zip(find_tensors(run(loaded, rows)), find_tensors(run(smaller, rows)), strict=True))
    assert pairs
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
@pytest.mark.parametrize("name", EVERY)
def test_exported(name: str, ending: str, tmp_path: Path) -> None:
    """`export` compares by itself; here the file is opened once more, the way a user does."""
    smaller, _, inputs = make_smaller(name)
    single = copy.deepcopy(smaller).float()
    path = tmp_path / f"model.{ending}"
    done = cn.export(single, path, inputs)
    assert [done.path, done.bytes] == [path, path.stat().st_size]
    rows = torch.cat([inputs, -inputs, 2 * inputs]).float()
    with torch.no_grad():
        expected = single(rows)
        found = OPENERS[ending](path)(rows)
    assert (found - expected).abs().max() <= EXPORT_TOLERANCE[torch.float32] * max(1.0, float(expected.abs().max()))
    assert list(tmp_path.iterdir()) == [path]


def open_with_onnxruntime(path: Path) -> Callable[[Tensor], Tensor]:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda rows: torch.from_numpy(session.run(None, {"input": rows.numpy()})[0])


OPENERS = {"onnx": open_with_onnxruntime, "pt2": lambda path: torch.export.load(path).module()}
