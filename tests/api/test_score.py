"""Scoring: from a model and a batch to scores, checked against arithmetic of our own."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

import critical_neurons as cn
from critical_neurons.core import deadline
from critical_neurons.core.solution import Solution, Status, relative_gap
from critical_neurons.errors import (
    CriticalNeuronsError,
    InvalidInputError,
    InvalidSettingError,
    SolverError,
    UnreadableModelError,
)
from tests.settings import settle
from tests.zoo import first_or_slow, share_case

RECOMPUTED = 1e-5
"""Largest relative difference between the optimum found here or by the solver and the objective of rounded scores."""

FEASIBLE = 1e-5
"""By how much a row may be violated, relative to the largest pre-activation of its layer."""

ROUNDING = 1e-9
TIGHT = 1e-8
"""A gap so small that it leaves no room for other scores of nearly the same objective."""

TIED = 1e-4
"""How close scores must come when the gap is tight."""

OVERTIME = 2.0
"""Seconds by which a time limit may be missed."""

QUICK = {"threads": 1, "time_limit": 30.0}


def make_mlp(*sizes, seed=0):
    torch.manual_seed(seed)
    layers = []
    for before, after in pairwise(sizes):
        layer = nn.Linear(before, after).double()
        nn.init.normal_(layer.weight, 0.0, 1.5 / before**0.5)
        nn.init.normal_(layer.bias, 0.0, 0.3)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def draw(count, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.rand(count, size, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


MODEL = make_mlp(4, 8, 6, 3)
INPUTS, LABELS = draw(5, 4)
GATED = {"input_radius": 0.05, **QUICK}
"""Leaves a dozen gates open on MODEL and INPUTS."""

SLOW = (make_mlp(6, 24, 24, 3), *draw(8, 6))
SLOW_SETTINGS = {"input_radius": 0.1, "gap": 1e-6, "threads": 1}
"""Takes far longer than the limits given here."""


class Recursion:
    """h = p - (1 - s) U on live units and 0 on dead ones, layer after layer; U is p of the unpruned network."""

    def __init__(self, model, inputs):
        self.weights = [
            (m.weight.detach().numpy(), m.bias.detach().numpy()) for m in model if isinstance(m, nn.Linear)
        ]
        self.inputs = inputs.numpy()
        self.sizes = [len(bias) for _, bias in self.weights[:-1]]
        self.tops, h = [], self.inputs
        for weight, bias in self.weights[:-1]:
            self.tops.append(h @ weight.T + bias)
            h = np.maximum(self.tops[-1], 0.0)

    def run(self, scores):
        """The shrunk pre-activations of every hidden layer, and the logits."""
        shrunk, h = [], self.inputs
        for (weight, bias), top, score in zip(self.weights, self.tops, scores, strict=False):
            q = h @ weight.T + bias - (1 - score) * np.maximum(top, 0.0)
            shrunk.append(q)
            h = np.where(top > 0, q, 0.0)
        weight, bias = self.weights[-1]
        return shrunk, h @ weight.T + bias

    def violation(self, scores):
        shrunk, _ = self.run(scores)
        return max(
            np.maximum(np.minimum(top, 0) - q, q - np.maximum(top, 0)).max() / np.abs(top).max()
            for top, q in zip(self.tops, shrunk, strict=True)
        )

    def rows(self):
        """All rows as one matrix over all scores: lower <= matrix s <= upper."""
        count = sum(self.sizes)
        base = np.concatenate([q.ravel() for q in self.run(self.split(np.zeros(count)))[0]])
        columns = [np.concatenate([q.ravel() for q in self.run(self.split(row))[0]]) - base for row in np.eye(count)]
        tops = np.concatenate([top.ravel() for top in self.tops])
        return np.array(columns).T, np.minimum(tops, 0.0) - base, np.maximum(tops, 0.0) - base

    def split(self, flat):
        return np.split(flat, np.cumsum(self.sizes)[:-1])


def softmax_losses(logits, labels):
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(labels)), labels]


def compute_objective(scores, logits, labels, *, objective, loss_weight=5.0, rescale=2.0, kernels=()):
    """Section 2 of the method, in so many words. `kernels`: positions of each layer's kernel."""
    losses = softmax_losses(logits, labels)
    if objective == "paper":
        total = sum(len(score) for score in scores)
        parts = [(score - rescale).sum() / total for score in scores]
        loss = losses.sum()
    else:
        counted = kernels if objective == "authors" else [1] * len(scores)
        parts = [(score - rescale).sum() / (len(score) * k) for score, k in zip(scores, counted, strict=True)]
        loss = losses.mean()
    sparsity = sum(parts) - min(parts) if len(parts) > 1 else parts[0]
    return sparsity + loss_weight * loss


def same_bits(left, right):
    return all(left[name].tobytes() == right[name].tobytes() for name in left) and list(left) == list(right)


def assert_consistent(scores):
    assert all(((values >= 0) & (values <= 1)).all() for values in scores.values())
    assert scores.gap == relative_gap(scores.objective, scores.bound)
    if scores.bound is not None:
        assert scores.bound <= scores.objective + ROUNDING * max(1.0, abs(scores.objective))
    if scores.status is cn.Status.OPTIMAL:
        assert scores.gap <= scores.settings["solver"].gap
    for before, after in pairwise(scores.history):
        assert before.seconds <= after.seconds
        assert before.rows <= after.rows
        assert before.cuts <= after.cuts
        assert before.bound is None or after.bound >= before.bound
        tolerance = scores.settings["solver"].gap * max(1.0, abs(after.objective))
        assert before.objective is None or after.objective <= before.objective + tolerance


@pytest.mark.parametrize("sizes", [(4, 6, 3), (4, 8, 6, 3), (3, 5, 4, 4, 3)], ids=str)
@pytest.mark.parametrize("objective", ["balanced", "paper"])
@pytest.mark.parametrize("seed", first_or_slow(0, 1, 2))
def test_the_objective_is_that_of_the_scores(sizes, objective, seed):
    model, (inputs, labels) = make_mlp(*sizes, seed=seed), draw(4, sizes[0], seed)
    scores = cn.score(model, inputs, labels, **settle(objective=objective, loss_weight=2.0, rescale=1.5, **QUICK))
    recursion = Recursion(model, inputs)
    values = list(scores.values())
    assert [len(value) for value in values] == recursion.sizes
    logits = recursion.run(values)[1]
    expected = compute_objective(values, logits, labels.numpy(), objective=objective, loss_weight=2.0, rescale=1.5)
    assert scores.objective == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)
    assert recursion.violation(values) <= FEASIBLE
    assert scores.status is cn.Status.OPTIMAL
    assert_consistent(scores)
    ones = [np.ones(size) for size in recursion.sizes]
    start = compute_objective(
        ones, recursion.run(ones)[1], labels.numpy(), objective=objective, loss_weight=2.0, rescale=1.5
    )
    assert scores.bound <= scores.objective <= start


@pytest.mark.parametrize("objective", ["balanced", "paper"])
@pytest.mark.parametrize("seed", first_or_slow(0, 1, 2, 3))
def test_without_loss_the_program_is_linear_and_ties_go_to_the_smallest_total(objective, seed):
    model, (inputs, labels) = make_mlp(4, 8, 6, 3, seed=seed), draw(4, 4, seed)
    scores = cn.score(model, inputs, labels, **settle(objective=objective, loss_weight=0.0, gap=TIGHT, **QUICK))
    recursion = Recursion(model, inputs)
    weights = np.concatenate([np.full(n, 1 / n if objective == "balanced" else 1 / 14) for n in recursion.sizes])
    owner = np.repeat([0, 1], recursion.sizes)
    matrix, lower, upper = recursion.rows()
    left_out = np.array([weights * (owner != layer) for layer in (0, 1)])  # sums with one layer left out
    rows = np.vstack(
        [np.column_stack([matrix, np.zeros(len(matrix))]), np.column_stack([-matrix, np.zeros(len(matrix))])]
    )
    epigraph = np.column_stack([left_out, -np.ones(2)])
    limits = np.concatenate([upper, -lower, 2.0 * left_out.sum(axis=1)])
    bounds = [(0, 1)] * 14 + [(None, None)]
    best = linprog(np.eye(15)[14], np.vstack([rows, epigraph]), limits, bounds=bounds)
    assert best.status == 0
    assert scores.objective == pytest.approx(best.fun, rel=RECOMPUTED, abs=RECOMPUTED)
    assert scores.bound <= best.fun + RECOMPUTED
    slack = scores.settings["solver"].gap * max(1.0, abs(best.fun))
    smallest = linprog(
        np.append(np.ones(14), 0.0),
        np.vstack([rows, epigraph, np.eye(15)[14:]]),
        np.append(limits, best.fun + slack),
        bounds=bounds,
    )
    assert smallest.status == 0
    total = sum(values.sum() for values in scores.values())
    assert total <= smallest.fun + TIED * 14
    assert total >= smallest.fun - TIED * 14


def test_the_printed_objective_leaves_ties_that_are_broken():
    """The largest layer drops out of the printed sparsity term; only the tie-break moves its scores."""
    scores = cn.score(MODEL, INPUTS, LABELS, **settle(objective="paper", **QUICK))
    assert (scores["0"] == 0).sum() > 0


def test_the_balanced_objective_ignores_the_rescale():
    plain, rescaled, far = (
        cn.score(MODEL, INPUTS, LABELS, **settle(rescale=c, gap=TIGHT, **QUICK)) for c in (2.0, 0.0, -3.0)
    )
    for other in (rescaled, far):
        for name in plain:
            assert other[name] == pytest.approx(plain[name], abs=TIED)
    assert rescaled.objective == pytest.approx(plain.objective + 2.0, abs=RECOMPUTED)
    assert far.objective == pytest.approx(plain.objective + 5.0, abs=RECOMPUTED)


def make_convolutional():
    """A model with kernels of 6, 4 and 1 positions, and a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 2, (2, 3)), nn.ReLU(), nn.Conv2d(2, 3, 2), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(18, 4), nn.ReLU(), nn.Linear(4, 3)),
    )
    inputs = torch.rand(3, 1, 4, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return model.double(), inputs, [0, 1, 2]


def shrink_activations(model, inputs, scores):
    """The logits with h = p - (1 - s) U on live units and 0 on dead ones; U is p of the unpruned network."""
    left = iter(scores)
    plain = shrunk = inputs
    with torch.no_grad():
        for module in model:
            if isinstance(module, nn.ReLU):
                score = torch.from_numpy(next(left)).reshape(-1, *[1] * (plain.ndim - 2))
                shrunk = torch.where(plain > 0, shrunk - (1 - score) * plain, 0.0)
                plain = plain.relu()
            else:
                plain, shrunk = module(plain), module(shrunk)
    return shrunk.numpy()


@pytest.mark.parametrize("rescale", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("objective", ["balanced", "authors", "paper"])
def test_the_objective_of_convolutions(objective, rescale):
    model, inputs, labels = make_convolutional()
    scores = cn.score(model, inputs, labels, **settle(objective=objective, rescale=rescale, loss_weight=0.5, **QUICK))
    logits = shrink_activations(model, inputs, scores.values())
    expected = compute_objective(
        list(scores.values()),
        logits,
        labels,
        objective=objective,
        loss_weight=0.5,
        rescale=rescale,
        kernels=(6, 4, 1),
    )
    assert min(values.min() for values in scores.values()) < 1
    assert scores.objective == pytest.approx(expected, rel=ROUNDING, abs=ROUNDING)
    assert_consistent(scores)


def test_the_rescale_decides_which_layer_the_authors_objective_leaves_out():
    """With c = 2 that is the linear layer, with c = 0 a convolution."""
    none, two = (
        cn.score(*make_convolutional(), **settle(objective="authors", rescale=c, **QUICK)) for c in (0.0, 2.0)
    )
    assert none["5"].mean() < two["5"].mean() - 0.1
    assert none["2"].mean() > two["2"].mean() + 0.1


def test_inputs_of_every_kind():
    expected = cn.score(MODEL, INPUTS, LABELS, **settle(**QUICK))
    dataset = torch.utils.data.TensorDataset(INPUTS, LABELS)
    kinds = {
        "arrays": (INPUTS.numpy(), LABELS.numpy()),
        "labels in a list": (INPUTS, LABELS.tolist()),
        "small labels": (INPUTS, LABELS.to(torch.uint8)),
        "inputs with gradients": (INPUTS.clone().requires_grad_(), LABELS),
        "loader": (torch.utils.data.DataLoader(dataset, batch_size=2), None),
        "pairs": ([(INPUTS[:3], LABELS[:3]), [INPUTS[3:].numpy(), LABELS[3:].numpy()]], None),
        "generator": (((INPUTS[at : at + 1], LABELS[at : at + 1]) for at in range(5)), None),
    }
    for kind, (inputs, labels) in kinds.items():
        found = cn.score(MODEL, inputs, labels, **settle(**QUICK))
        assert same_bits(found, expected), kind
        assert found.objective == expected.objective, kind
        assert found.settings["labels"] == LABELS.tolist()
        assert found.settings["labels_from"] == "user"


def test_without_labels_the_predictions_are_used():
    with torch.no_grad():
        predictions = MODEL(INPUTS).argmax(dim=1)
    assert predictions.tolist() != LABELS.tolist()
    expected = cn.score(MODEL, INPUTS, predictions, **settle(**QUICK))
    for inputs in (INPUTS, [INPUTS[:2], INPUTS[2:]]):
        scores = cn.score(MODEL, inputs, **settle(**QUICK))
        assert same_bits(scores, expected)
        assert scores.settings["labels"] == predictions.tolist()
        assert scores.settings["labels_from"] == "model"


def test_single_and_double_precision_models():
    single = make_mlp(4, 8, 6, 3).float()
    scores = cn.score(single, INPUTS.float(), LABELS, **settle(**QUICK))
    assert scores["0"].dtype == np.float64
    assert scores.logit_error <= ROUNDING


@pytest.mark.parametrize(
    "settings",
    [{}, {"objective": "paper"}, {"input_radius": 0.05}, {"input_radius": 0.05, "integer": False}],
    ids=str,
)
def test_the_same_call_gives_the_same_bits(settings):
    one, other = (cn.score(MODEL, INPUTS, LABELS, **settle(**QUICK, **settings)) for _ in range(2))
    assert same_bits(one, other)
    assert (one.objective, one.bound) == (other.objective, other.bound)
    assert one.sizes == other.sizes
    ends = [(scores.history[-1].objective, scores.history[-1].bound) for scores in (one, other)]
    assert ends[0] == ends[1]  # how often there is a report on the way depends on the clock


def test_what_scores_carry():
    seen = []
    scores = cn.score(MODEL, INPUTS, LABELS, **settle(loss_weight=3.0, progress=seen.append, seed=7, **GATED))
    assert seen == list(scores.history)
    assert set(scores.sizes) == {"columns", "rows", "rows_used", "gates", "cuts"}
    assert scores.sizes["gates"] > 0
    assert scores.sizes["columns"] == 14 + 2 * scores.sizes["gates"] + 1 + 5
    assert scores.sizes["rows_used"] <= 2 * scores.sizes["rows"]
    assert scores.settings["formulation"] == cn.Paper(loss_weight=3.0, input_radius=0.05)
    assert scores.settings["solver"] == cn.Solver(seed=7, **QUICK)
    assert scores.settings["versions"]["torch"] == torch.__version__
    assert scores.logit_error <= ROUNDING
    assert 0 < scores.seconds < 30
    assert scores.fingerprint == cn.inspect(MODEL, INPUTS).fingerprint
    assert_consistent(scores)


def test_integer_and_relaxed():
    model, (inputs, labels) = make_mlp(4, 8, 6, 3, seed=1), draw(4, 4, 1)
    differences = []
    for radius in (0.02, 0.05, 0.1):
        integer, relaxed = (
            cn.score(model, inputs, labels, **settle(input_radius=radius, integer=integer, **QUICK))
            for integer in (True, False)
        )
        assert integer.status is relaxed.status is cn.Status.OPTIMAL
        assert_consistent(integer)
        assert_consistent(relaxed)
        slack = 1e-4 * max(1.0, abs(integer.objective))
        assert relaxed.bound <= integer.objective + slack
        assert relaxed.objective <= integer.objective + 2 * slack
        assert relaxed.sizes["gates"] == integer.sizes["gates"] > 0
        differences.append(integer.objective - relaxed.objective)
    assert max(differences) > 1e-3


def test_without_a_radius_there_are_no_gates():
    integer, relaxed = (
        cn.score(MODEL, INPUTS, LABELS, **settle(integer=integer, **QUICK)) for integer in (True, False)
    )
    assert integer.sizes["gates"] == 0
    assert same_bits(integer, relaxed)


@pytest.mark.parametrize("shift", [-4.0, 4.0])
@pytest.mark.parametrize("radius", [0.0, 0.05])
def test_inputs_outside_the_unit_box(shift, radius):
    scores = cn.score(MODEL, INPUTS + shift, LABELS, **settle(input_radius=radius, **QUICK))
    assert scores.status is cn.Status.OPTIMAL
    assert scores.logit_error <= ROUNDING
    assert_consistent(scores)


def test_ignored_layers_have_no_scores():
    scores = cn.score(MODEL, INPUTS, LABELS, **settle(ignore=("0",), **QUICK))
    assert list(scores) == ["2"]
    recursion = Recursion(MODEL, INPUTS)
    logits = recursion.run([np.ones(8), scores["2"]])[1]
    expected = compute_objective([scores["2"]], logits, LABELS.numpy(), objective="balanced")
    assert scores.objective == pytest.approx(expected, rel=RECOMPUTED)
    assert same_bits(scores, cn.score(MODEL, INPUTS, LABELS, **settle(ignore="0", **QUICK)))
    assert cn.plan(scores, units=0.5).layers[0].reason == "ignored, as asked"


def test_by_class():
    labels = torch.tensor([2, 0, 2, 0, 0])
    scores = cn.score(MODEL, INPUTS, labels, **settle(by_class=True, **QUICK))
    assert len(scores.parts) == 2
    alone = [cn.score(MODEL, INPUTS[labels == label], labels[labels == label], **settle(**QUICK)) for label in (0, 2)]
    for part, one in zip(scores.parts, alone, strict=True):
        assert same_bits(part, one)
        assert part.objective == one.objective
        assert part.settings["labels"] == one.settings["labels"]
    for name in scores:
        assert scores[name] == pytest.approx((alone[0][name] + alone[1][name]) / 2, abs=ROUNDING)
    assert scores.objective is None
    assert scores.gap == max(one.gap for one in alone)
    assert scores.status is cn.Status.OPTIMAL
    assert scores.notes == ()


def test_by_class_remembers_all_labels():
    labels = [2, 0, 2, 0, 0]
    scores = cn.score(MODEL, INPUTS, labels, **settle(by_class=True, **QUICK))
    assert sorted(scores.settings["labels"]) == sorted(labels)


def test_solvers_agree():
    ours = cn.score(MODEL, INPUTS, LABELS, **settle(integer=False, **GATED))
    theirs = cn.score(MODEL, INPUTS, LABELS, **settle(integer=False, solver="cvxpy:CLARABEL", **GATED))
    assert theirs.objective == pytest.approx(ours.objective, rel=1e-3)
    assert theirs.bound is None
    assert theirs.gap is None
    assert theirs.logit_error <= ROUNDING


def test_threads_may_change_from_call_to_call():
    results = [
        cn.score(
            MODEL,
            INPUTS,
            LABELS,
            formulation=cn.Paper(input_radius=0.05),
            solver=cn.Solver(threads=threads, time_limit=30.0),
        )
        for threads in (1, 2, None, 1)
    ]
    assert all(scores.status is cn.Status.OPTIMAL for scores in results)
    assert same_bits(results[0], results[3])


def test_a_net_of_convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.AvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)),
    )
    images = torch.rand(4, 1, 4, 4)
    scores = cn.score(model, images, **settle(**QUICK))
    assert {name: len(values) for name, values in scores.items()} == {"0": 3, "5": 4}
    assert scores.status is cn.Status.OPTIMAL
    assert scores.logit_error <= ROUNDING
    assert_consistent(scores)


@pytest.mark.parametrize("by_class", [False, True])
@pytest.mark.parametrize("seconds", [1e-6, 0.3])
def test_the_time_limit_is_honoured(seconds, by_class):
    model, inputs, labels = SLOW
    started = time.monotonic()
    scores = cn.score(model, inputs, labels, **settle(time_limit=seconds, by_class=by_class, **SLOW_SETTINGS))
    assert time.monotonic() - started <= seconds + OVERTIME
    if seconds < 1e-3:
        assert all(np.array_equal(values, np.ones_like(values)) for values in scores.values())
    if not by_class:
        assert scores.status is cn.Status.FEASIBLE
        assert scores.gap is None or scores.gap > 1e-6
        assert_consistent(scores)


class Interruption:
    """Ctrl-C at the given report of progress, counted over all programs of a call."""

    def __init__(self, at):
        self.left = at

    def __call__(self, step):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


class SecondInterrupted:
    """Ctrl-C at the first report on the second program of a call: rows and cuts are counted anew."""

    def __init__(self):
        self.most = 0

    def __call__(self, step):
        if step.rows + step.cuts < self.most:
            raise KeyboardInterrupt
        self.most = step.rows + step.cuts


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_returns_the_best_so_far(at):
    scores = cn.score(MODEL, INPUTS, LABELS, **settle(progress=Interruption(at), **GATED))
    assert scores.status is cn.Status.FEASIBLE
    assert len(scores.history) == at
    assert scores.objective == pytest.approx(scores.history[-1].objective, rel=RECOMPUTED)
    assert scores.bound < scores.objective
    assert_consistent(scores)
    assert cn.prune(MODEL, cn.plan(scores, units=0.5), INPUTS)[0].out_features == 4


def test_an_interrupt_keeps_the_classes_done():
    labels = torch.tensor([0, 1, 2, 0, 1])
    whole = cn.score(MODEL, INPUTS, labels, **settle(by_class=True, **GATED))
    scores = cn.score(MODEL, INPUTS, labels, **settle(by_class=True, progress=SecondInterrupted(), **GATED))
    assert len(scores.parts) == 2
    assert same_bits(scores.parts[0], whole.parts[0])
    assert scores.parts[0].status is cn.Status.OPTIMAL
    assert scores.parts[1].status is cn.Status.FEASIBLE
    assert scores.status is cn.Status.FEASIBLE
    assert scores.notes == ("interrupted: 2 of 3 classes averaged",)
    for name in scores:
        assert scores[name] == pytest.approx(np.mean([part[name] for part in scores.parts], axis=0))


def test_classes_solved_earlier_are_not_solved_again(tmp_path):
    """But those are that Ctrl-C stopped, and those of other settings."""
    labels = torch.tensor([0, 1, 2, 0, 1])
    whole = cn.score(MODEL, INPUTS, labels, **settle(by_class=True, **GATED))
    first = len(whole.parts[0].history)
    cn.score(MODEL, INPUTS, labels, **settle(by_class=True, progress=Interruption(first + 1), **GATED)).save(
        tmp_path / "s.json"
    )
    earlier, reported = cn.Scores.load(tmp_path / "s.json"), []
    scores = cn.score(
        MODEL, INPUTS, labels, **settle(by_class=True, earlier=earlier, progress=reported.append, **GATED)
    )
    assert {step.label for step in reported} == {1, 2}
    assert scores.parts[0] is earlier.parts[0]
    assert same_bits(scores, whole)
    assert scores.notes == ()
    assert str(reported[0]).startswith("1 of 3 classes done; class 1: ")
    other = {**GATED, "loss_weight": 3.0}
    cn.score(MODEL, INPUTS, labels, **settle(by_class=True, earlier=earlier, progress=reported.append, **other))
    assert {step.label for step in reported} == {0, 1, 2}


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT there")
def test_ctrl_c_while_the_solver_works():
    """A real signal, half a second after the first step: inside branch and bound."""
    model, inputs, labels = SLOW
    timers = []

    def interrupt_later(step):
        if not timers:
            timers.append(threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)))
            timers[0].start()

    begun = time.monotonic()
    settings = settle(time_limit=120, progress=interrupt_later, **SLOW_SETTINGS)
    scores = cn.score(model, inputs, labels, **settings)
    assert scores.status is cn.Status.FEASIBLE
    assert time.monotonic() - begun < 60  # of the 120 that it was given


NAN, INFINITY = float("nan"), float("inf")


def spoil(position, value):
    inputs = INPUTS.clone()
    inputs[position] = value
    return inputs


BAD_BATCHES = {
    "wrong features": ((torch.rand(2, 5), [0, 1]), "does not run on inputs of shape"),
    "one row": ((torch.rand(4), [0]), "inputs: found shape (4,). Accepted: (batch, ...)"),
    "no data points": ((torch.rand(0, 4), []), "the batch is empty"),
    "no batches": (([], None), "the batch is empty"),
    "integers": ((torch.ones(2, 4, dtype=torch.int64), [0, 1]), "inputs: found int64"),
    "several by name": (({"a": torch.ones(2, 4), "b": torch.ones(2, 4)}, [0, 1]), "found 2 of them by name"),
    "NaN": ((spoil(3, NAN), LABELS), "inputs: NaN or infinite values in data points 3"),
    "infinite": ((spoil(1, -INFINITY), LABELS), "inputs: NaN or infinite values in data points 1"),
    "label too large": ((INPUTS, [0, 1, 2, 3, 0]), "labels: found 3. Accepted: 0 to 2"),
    "negative label": ((INPUTS, [0, -1, 2, 1, 0]), "labels: found -1. Accepted: 0 to 2"),
    "too few labels": ((INPUTS, [0, 1]), "labels: found shape (2,) for 5 data points"),
    "labels in a column": ((INPUTS, LABELS[:, None]), "labels: found shape (5, 1)"),
    "one-hot labels": ((INPUTS, torch.eye(3)[LABELS]), "labels: found shape (5, 3)"),
    "labels with a point": ((INPUTS, LABELS.double()), "or integers, the index of the right class"),
    "some labels": (([(INPUTS, LABELS), INPUTS], None), "some of the batches have labels and some have none"),
    "a path": (("data.npz", None), "inputs"),
    "a list with labels": (([INPUTS], LABELS), "inputs: found list"),
    "a pair in place of two arguments": (((INPUTS, LABELS), None), "inputs"),
    "batches of different shapes": (([(INPUTS, LABELS), (torch.rand(2, 5), [0, 1])], None), "inputs"),
    "triples": (([(INPUTS, LABELS, LABELS)], None), "inputs"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_bad_batches(case):
    (inputs, labels), message = BAD_BATCHES[case]
    with pytest.raises(InvalidInputError) as caught:
        cn.score(MODEL, inputs, labels, **settle(**QUICK))
    assert message in str(caught.value)
    assert isinstance(caught.value, ValueError)


BAD_SETTINGS = {
    "negative loss weight": ({"loss_weight": -1.0}, "loss_weight: found -1.0. Accepted: 0 or more"),
    "loss weight that is no number": ({"loss_weight": NAN}, "loss_weight: found nan"),
    "infinite loss weight": ({"loss_weight": INFINITY}, "loss_weight: found inf"),
    "loss weight in words": ({"loss_weight": "5"}, "loss_weight: found '5'"),
    "negative radius": ({"input_radius": -1e-9}, "input_radius: found -1e-09. Accepted: 0 or more"),
    "infinite radius": ({"input_radius": INFINITY}, "input_radius: found inf"),
    "objective": ({"objective": "mine"}, "objective: found 'mine'. Accepted: 'balanced', 'authors', 'paper'"),
    "rescale": ({"rescale": NAN}, "rescale: found nan"),
    "no time": ({"time_limit": 0.0}, "time_limit: found 0.0"),
    "time that is no number": ({"time_limit": NAN}, "time_limit: found nan"),
    "negative gap": ({"gap": -1e-4}, "gap: found -0.0001"),
    "no threads": ({"threads": 0}, "threads: found 0. Accepted: a whole number of at least 1"),
    "half a thread": ({"threads": 1.5}, "threads: found 1.5"),
    "negative seed": ({"seed": -1}, "seed: found -1"),
    "half a seed": ({"seed": 0.5}, "seed: found 0.5"),
    "seed too large": ({"seed": 2**40}, "seed: found 1099511627776"),
    "unknown solver": (
        {"solver": "gurobi"},
        "solver: found 'gurobi'. Accepted: 'auto', 'highs', 'barrier', 'first-order', 'scip', or '",
    ),
    "unknown solver of CVXPY": ({"solver": "cvxpy:NOBODY"}, "cvxpy:NOBODY is not installed"),
    "unknown layer": ({"ignore": ("9",)}, "ignore: no layer is called 9. Layers: 0, 2, 4"),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case):
    settings, message = BAD_SETTINGS[case]
    with pytest.raises(InvalidSettingError) as caught:
        cn.score(MODEL, INPUTS, LABELS, **settle(**settings))
    assert message in str(caught.value)


def test_numbers_of_numpy_are_numbers():
    plain = cn.score(MODEL, INPUTS, LABELS, **settle(loss_weight=2.0, seed=3, **QUICK))
    numpys = cn.score(MODEL, INPUTS, LABELS, **settle(loss_weight=np.float32(2.0), seed=np.int64(3), **QUICK))
    assert same_bits(plain, numpys)


BAD_MODELS = {
    "nothing to score": (nn.Sequential(nn.Linear(4, 3)), InvalidInputError, "nothing to score"),
    "nothing left to score": (
        nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3), nn.ReLU()),
        InvalidInputError,
        "no ReLU stands between it and 1",
    ),
    "one output, no labels": (make_mlp(4, 3, 1), InvalidInputError, "the model has one output, and none are given"),
    "half precision": (make_mlp(4, 3, 2).half(), UnreadableModelError, "half precision"),
    "no model": ("resnet18", UnreadableModelError, "found str, expected a torch.nn.Module"),
}


@pytest.mark.parametrize("case", BAD_MODELS)
def test_bad_models(case):
    model, error, message = BAD_MODELS[case]
    with pytest.raises(error) as caught:
        cn.score(model, INPUTS, **settle(**QUICK))
    assert message in str(caught.value)
    assert isinstance(caught.value, CriticalNeuronsError)


def test_settings_are_checked_before_the_data():
    """Before any long work: a loader is not even opened."""

    def loader():
        raise AssertionError("the data were asked for")
        yield

    with pytest.raises(InvalidSettingError):
        cn.score(MODEL, loader(), formulation=cn.Paper(loss_weight=-1.0))
    with pytest.raises(InvalidSettingError):
        cn.score(MODEL, loader(), solver="nobody")


@pytest.fixture
def patient_reading(monkeypatch):
    """A busy machine may take longer to read a model than it is given beyond the time limit."""
    monkeypatch.setattr(deadline, "GRACE", 60.0)


@pytest.mark.usefixtures("patient_reading")
def test_a_time_limit_that_ends_before_the_program_is_ready(tmp_path):
    case = share_case("mlp")
    scores = cn.score(case.model, case.inputs, case.labels, solver=cn.Solver(time_limit=1e-9))
    solved = cn.score(case.model, case.inputs, case.labels)
    assert scores.status is Status.FEASIBLE
    assert (scores.per_unit == 1).all()
    assert scores.bound <= solved.bound <= solved.objective <= scores.objective
    assert "time limit" in scores.notes[-1]
    scores.save(tmp_path / "scores.json")
    with pytest.raises(SolverError, match="time limit"):
        cn.score(case.model, case.inputs, budget=cn.Budget(units=0.5), solver=cn.Solver(time_limit=1e-9))


@pytest.mark.usefixtures("patient_reading")
def test_a_time_limit_of_classes_that_ends_before_programs_are_ready():
    case = share_case("mlp")
    scores = cn.score(case.model, case.inputs, [0, 1, 1], formulation=cn.ByClass(), solver=cn.Solver(time_limit=1e-9))
    assert scores.status is Status.FEASIBLE
    assert (scores.per_unit == 1).all()


def draw_scaled(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[0].bias.mul_(scale)
    return model, torch.rand(3, 6, dtype=torch.float64)


@pytest.mark.parametrize("formulation", ["paper", "exact", "linearised"])
def test_weights_beyond_what_the_solver_takes_are_reported(formulation):
    model, inputs = draw_scaled(1e30)
    with pytest.raises(SolverError, match="coefficients up to"):
        cn.score(model, inputs, [0, 1, 2], formulation=formulation)


def test_what_rounding_costs_is_not_called_optimal():
    model, inputs = draw_scaled(1e12)
    scores = cn.score(model, inputs, [0, 1, 2], solver=cn.Solver(time_limit=5.0))
    assert scores.gap > 1
    assert scores.status is Status.FEASIBLE


def test_a_budget_that_interior_points_find_no_scores_for(monkeypatch):
    case = share_case("mlp")
    nothing = Solution(Status.TIMED_OUT, None, None, None, 0.0, (), {})
    monkeypatch.setattr("critical_neurons.solvers.interior_point._BarrierSearch.run", lambda search: nothing)
    with pytest.raises(
        SolverError, match=r"There may be none within Budget\(units=0.5\); solver='highs' can decide that"
    ):
        cn.score(
            case.model,
            case.inputs,
            formulation=cn.Paper(integer=False),
            budget=cn.Budget(units=0.5),
            solver=cn.Solver("barrier"),
        )
