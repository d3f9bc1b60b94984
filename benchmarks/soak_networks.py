"""Soak test of networks: a random network through every public call, and the properties that must hold."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.network import MaxPool
from critical_neurons.errors import CriticalNeuronsError, ExportError
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from tests.laws.test_soundness import assert_inside
from tests.structure.checks import SAME, inspect_twice
from tests.structure.drawn import draw_network

CALIBRATION_ROWS = 24
EXPORTED = 10
"""One in this many networks is exported to ONNX, which takes longer than everything else, and one to torch.export."""

SAME_OPTIMUM = 1e-4
MOST_UNITS = 24
"""Largest network whose literal program is solved, too."""


def go_the_whole_way(seed: int) -> str:
    """Inspect, search, plan, prune, mask, save, load, export; score, if there is a program. Returns the steps
    done."""
    model, inputs = draw_model(seed)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    inspect_twice(model, inputs[:2], seeds=1)
    went = [_search(model, inputs, seed), _score(model, inputs, seed)]
    unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert unchanged, "the model has changed"
    return ", ".join(each for each in went if each)


def draw_model(seed: int) -> tuple[nn.Module, torch.Tensor]:
    """A network in double precision, and inputs. In every second one, ReLUs replace functions that have no
    program."""
    model, example = draw_network(seed)
    if seed % 2:
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Tanh | nn.GELU | nn.InstanceNorm2d):
                owner, _, key = name.rpartition(".")
                setattr(model.get_submodule(owner), key, nn.ReLU())
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(CALIBRATION_ROWS, *example.shape[1:], generator=generator, dtype=torch.float64)
    return model.eval().double(), inputs


def _search(model: nn.Module, inputs: torch.Tensor, seed: int) -> str:
    generator = np.random.default_rng(seed)
    compensate = ("least_squares", "none", "bias")[seed % 3]
    measure, share = str(generator.choice(["units", "params", "macs"])), float(generator.choice([0.3, 0.5, 0.8]))
    try:
        scores = cn.search(model, inputs, **{measure: share}, effort="quick", compensate=compensate)
    except CriticalNeuronsError:
        return ""  # too little can be removed
    plan = cn.plan(scores)
    assert all(len(kept) for kept in plan.kept.values()), "a layer is empty"
    smaller = cn.prune(model, plan, inputs)
    assert_same(cn.mask(model, plan), smaller, inputs, SAME)
    refitted = cn.prune(model, plan, inputs, compensate=compensate)
    assert torch.isfinite(run_model(refitted, inputs)).all(), "refitted weights are not finite"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cn.save(refitted, folder / "saved", plan=plan, scores=scores)
        assert_same(cn.load(folder / "saved", model), refitted, inputs, 0.0)
        plan.save(folder / "plan.json")
        assert cn.Plan.load(folder / "plan.json").to_dict() == plan.to_dict(), "the plan has changed"
        endings = {0: "onnx", 1: "pt2"}
        if ending := endings.get(seed // 2 % EXPORTED):
            try:
                cn.export(refitted.float(), folder / f"smaller.{ending}", inputs.float())
            except ExportError:
                return f"searched, not for {ending}"  # the network depends on the batch size
            if ending == "onnx":
                assert_same(refitted, cn.from_onnx(folder / "smaller.onnx"), inputs.float(), 1e-4)
            return f"searched, exported to {ending}"
    return "searched"


def _score(model: nn.Module, inputs: torch.Tensor, seed: int) -> str:
    points, generator = inputs[:2], np.random.default_rng(seed)
    try:
        network = cn.read_network(model, points)
    except CriticalNeuronsError:
        return ""  # no program: not piecewise linear
    if not network.removable:
        return ""
    radius = float(generator.choice([0.0, 1e-3, 1e-2]))
    loss_weight = float(generator.choice([0.05, 1.0, 5.0]))
    formulation = [
        cn.Paper(input_radius=radius, loss_weight=loss_weight),
        cn.Paper(input_radius=radius, loss_weight=loss_weight, integer=False, bounds="backward"),
        cn.Linearised(loss_weight=loss_weight),
        cn.Exact(loss_weight=loss_weight),
    ][seed // 2 % 4]
    scores = cn.score(model, points, formulation=formulation, solver=cn.Solver(time_limit=2.0, threads=1))
    if not isinstance(formulation, cn.Linearised):  # which proves nothing
        assert scores.bound <= scores.objective + 1e-6 * max(1.0, abs(scores.objective)), "the bound is too high"
    assert scores.logit_error <= SAME, "scores at 1 do not give the logits"
    assert ((scores.per_unit >= 0) & (scores.per_unit <= 1)).all(), "a score outside [0, 1]"
    with tempfile.TemporaryDirectory() as name:
        scores.save(Path(name) / "scores.json")
        loaded = cn.Scores.load(Path(name) / "scores.json")
    assert loaded.to_dict() == scores.to_dict(), "the scores have changed"
    for rule in ({"threshold": 2.0}, {"units": 0.5}):
        plan = cn.plan(loaded, **rule)
        assert all(len(kept) for kept in plan.kept.values()), "a layer is empty"
        assert_same(cn.mask(model, plan), cn.prune(model, plan, inputs), inputs, SAME)
    centres = points.numpy()
    bounds = bound_network(network, centres, radius=radius)
    moved = centres + radius * generator.uniform(-1.0, 1.0, centres.shape)
    assert_inside(SimpleNamespace(network=network), bounds, network.evaluate(moved))
    if network.unit_count <= MOST_UNITS and not any(isinstance(op, MaxPool) for op in network.ops):
        _compare_optima(network, bounds, run_model(model, points).argmax(1).numpy())
        return "scored twice"
    return "scored"


def _compare_optima(network: cn.Network, bounds: cn.Bounds, labels: np.ndarray) -> None:
    """The eliminated program and the literal one have the same optimum, if both are solved in time."""
    programs = [
        encode(network, bounds, labels, Objective(), integer=False) for encode in (encode_paper, encode_literal)
    ]
    one, other = (cn.solve(each, cn.Solver("highs", time_limit=5.0, gap=1e-6, threads=1)) for each in programs)
    if one.status is other.status is cn.Status.OPTIMAL:
        difference = abs(one.objective - other.objective) / max(1.0, abs(other.objective))
        assert difference <= SAME_OPTIMUM, f"optima differ by {difference:.3g}"


@torch.no_grad()
def run_model(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(inputs)
    return outputs


def assert_same(one: nn.Module, other: nn.Module, inputs: torch.Tensor, tolerance: float) -> None:
    wanted, found = run_model(one, inputs), run_model(other, inputs)
    difference = float((wanted - found).abs().max())
    assert difference <= tolerance * max(1.0, float(wanted.abs().max())), f"outputs differ by {difference:.3g}"
