"""Distillation: nearer to the original on inputs held out, deterministic, bounded, for any model and any inputs."""

from __future__ import annotations

import copy
import time
from itertools import pairwise

import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.errors import InvalidSettingError
from critical_neurons.removal import distil as distil_module
from critical_neurons.removal.augmentation import blend, choose_augmentation, flip, paste, shift
from critical_neurons.removal.distil import distil, hold_out
from critical_neurons.removal.imitation import LAST_LAYER, STREAMS, Aim, Imitation, StreamReader, find_readers
from critical_neurons.removal.rows import find_tensors
from tests.any_models import ANY, build_any, halve, make_inputs, run

FEW = cn.Distillation(steps=8, learning_rate=1e-3)


def square(found, wanted):
    return (found - wanted).square().mean()


def build_pair():
    """A network, and another of its kind that gives something else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        original = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
        smaller = copy.deepcopy(original)
        with torch.no_grad():
            smaller[3].weight.add_(torch.randn(3, 16))
        return original, smaller, torch.randn(80, 6)


def train(settings, *, seed=0, report=lambda text: None, loss=square):
    return teach(*build_pair(), settings, seed=seed, report=report, loss=loss)


def teach(original, smaller, inputs, settings, *, loss=square, **options):
    split, aim = hold_out(inputs, 0), Aim(loss)
    return distil(original, smaller, *split, aim, augment=lambda given: given, settings=settings, **options)


def list_values(model):
    return list(model.state_dict().values())


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(list_values(one), list_values(other), strict=True))


def test_it_comes_nearer_on_inputs_it_never_saw():
    original, smaller, _ = build_pair()
    trained = train(cn.Distillation(steps=200))
    fresh = torch.randn(200, 6, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before, after = (square(each(fresh), original(fresh)) for each in (smaller, trained))
    assert after < before / 4
    assert torch.equal(trained[1].running_mean, smaller[1].running_mean)


def test_the_same_by_the_seed_whatever_the_state_of_torch():
    torch.manual_seed(1)
    one = train(FEW)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    other = train(FEW)
    assert torch.equal(torch.get_rng_state(), state)
    assert same(one, other)
    assert not same(one, train(FEW, seed=1))


def test_what_does_not_help_is_not_taken():
    _, smaller, _ = build_pair()
    assert same(train(cn.Distillation(steps=8, learning_rate=1e30)), smaller)
    assert same(train(FEW, loss=lambda found, wanted: -square(found, wanted).clamp(max=0)), smaller)


def test_an_eighth_is_held_out_and_few_are_judged_in_many_variants():
    inputs = torch.arange(100.0)[:, None]
    fitted, judged = hold_out(inputs, seed=3)
    assert sorted(torch.cat([fitted, judged]).flatten().tolist()) == list(range(100))
    assert len(judged) == 12
    assert not torch.equal(judged, hold_out(inputs, seed=4)[1])
    seen = []

    def augment(given):
        seen.append(len(given))
        return given

    original, smaller, _ = build_pair()
    few = torch.randn(16, 6)
    settings = cn.Distillation(steps=1, learning_rate=1e-3)
    distil(original, smaller, *hold_out(few, 0), Aim(square), augment=augment, settings=settings)
    assert sum(seen) == 1 + 14 + 2 * 128  # memory, a step, judged before and after it


def test_least_squares_never_sees_what_is_held_out(monkeypatch):
    """Else few inputs, which it fits too well, would make it look better than it is."""
    found = {}
    monkeypatch.setattr(
        "critical_neurons.api.prune.refit_behind", lambda *given: found.update(fitted=given[4]) or given[1]
    )
    monkeypatch.setattr(
        "critical_neurons.api.prune.distil", lambda *given, **options: found.update(judged=given[3]) or given[1]
    )
    model, inputs = build_pair()[0], torch.randn(80, 6)
    cn.prune(model, halve(model, inputs), inputs, compensate="distil")
    rows = [set(map(tuple, each.tolist())) for each in (found["fitted"], found["judged"])]
    assert [len(each) for each in rows] == [70, 10]
    assert not rows[0] & rows[1]


def test_the_given_models_stay_as_they_are():
    original, smaller, inputs = build_pair()
    smaller.train()
    smaller[0].weight.requires_grad_(False)
    before = [copy.deepcopy(list_values(each)) for each in (original, smaller)]
    trained = teach(original, smaller, inputs, FEW)
    for model, values in zip((original, smaller), before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(list_values(model), values, strict=True))
        assert all(each.grad is None for each in model.parameters())
    assert trained.training
    assert [each.requires_grad for each in trained.parameters()] == [False, True, True, True, True, True]
    assert not same(trained, smaller)


@pytest.mark.parametrize(("macs", "steps"), [(10, 4000), (2 * 10**7, 2344), (10**9, 800)])
def test_small_networks_take_more_steps(monkeypatch, macs, steps):
    monkeypatch.setattr(distil_module, "count_macs", lambda model, inputs: macs)
    chosen = []
    monkeypatch.setattr(distil_module._Training, "_train", lambda self, *given: chosen.append(given[1]) or 0.0)
    train(cn.Distillation(learning_rate=1e-3))
    assert chosen == [steps]


def test_batches_are_full_and_all_inputs_equally_frequent():
    """Else of 70 inputs every second batch would have six, mixed among themselves."""
    seen = []

    def augment(given):
        seen.append(given)
        return given

    original, smaller, inputs = build_pair()
    split = hold_out(inputs, 0)
    settings = cn.Distillation(steps=35, learning_rate=1e-3)
    distil(original, smaller, *split, Aim(square), augment=augment, settings=settings)
    batches = [each for each in seen if len(each) == 64 and each.unique(dim=0).shape[0] > len(split[1])]
    assert len(batches) == 35
    assert (torch.cat(batches).unique(dim=0, return_counts=True)[1] == 32).all()


@pytest.mark.parametrize(("losses", "taken"), [([5, 1, 2, 3], 3), ([5, 1, 2, 6], 1), ([5, 6, 7, 8], 5)])
def test_the_last_weights_are_taken_if_better_than_the_first(monkeypatch, losses, taken):
    """The best of many by few inputs is often worse than the last."""
    monkeypatch.setattr(distil_module, "CHECKS", 3)
    left, seen = iter(losses), {}

    def measure(training):
        loss = next(left)
        seen[loss] = list_values(copy.deepcopy(training._pair.smaller))
        return loss

    monkeypatch.setattr(distil_module._Training, "_measure", measure)
    trained = train(FEW)
    assert all(torch.equal(a, b) for a, b in zip(list_values(trained), seen[taken], strict=True))


def test_a_time_limit_ends_it():
    reported = []
    started = time.monotonic()
    train(cn.Distillation(steps=10**6, seconds=0.5), report=reported.append)
    assert time.monotonic() - started < 10
    assert "0 s left" in reported[-1]


def test_without_time_the_weights_stay():
    _, smaller, _ = build_pair()
    assert same(train(cn.Distillation(seconds=1e-9)), smaller)


def test_no_step_begins_that_would_end_too_late(monkeypatch):
    """Nor a trial of learning rates that would take more than its share."""
    monkeypatch.setattr(distil_module, "STEP_COST", 1e9)
    _, smaller, _ = build_pair()
    reported = []
    assert same(train(cn.Distillation(seconds=60.0), report=reported.append), smaller)
    assert not [each for each in reported if "held-out" in str(each)]


def test_an_interrupt_leaves_the_best_so_far():
    reported = []

    def interrupt(text):
        reported.append(text)
        if len(reported) == 40:
            raise KeyboardInterrupt

    _, smaller, _ = build_pair()
    trained = train(cn.Distillation(steps=50, learning_rate=1e-2), report=interrupt)
    assert len(reported) == 40
    assert not same(trained, smaller)


def test_it_takes_half_precision_and_inference_mode():
    original, smaller, inputs = build_pair()
    halves = [copy.deepcopy(each).to(torch.bfloat16) for each in (original, smaller)]
    trained = teach(*halves, inputs.bfloat16(), FEW)
    assert {each.dtype for each in trained.parameters()} == {torch.bfloat16}
    with torch.inference_mode():
        again = teach(original, smaller, inputs, FEW)
    assert same(again, train(FEW))


@pytest.mark.parametrize("name", ANY)
def test_any_model(name):
    model, inputs = build_any(name), make_inputs(name)
    plan = halve(model, inputs)
    reported = []
    settings = cn.Distillation(steps=3)
    smaller = cn.prune(model, plan, inputs, compensate=settings, progress=reported.append)
    plain = cn.prune(model, plan, inputs, compensate="least_squares")
    assert {name: each.shape for name, each in smaller.state_dict().items()} == {
        name: each.shape for name, each in plain.state_dict().items()
    }
    assert all(torch.isfinite(each).all() for each in find_tensors(run(smaller, inputs)))
    assert "s left" in reported[-1]


def test_losses_without_a_gradient_are_refused():
    with pytest.raises(InvalidSettingError, match="gradient"):
        train(FEW, loss=lambda found, wanted: square(found, wanted).detach())
    with pytest.raises(InvalidSettingError, match="gradient"):
        train(FEW, loss=lambda found, wanted: (found - wanted).square())


@pytest.mark.parametrize(
    "bad",
    [{"steps": 0}, {"seconds": 0}, {"batch_size": 1.5}, {"learning_rate": -1.0}, {"augment": "flips"}, {"loss": 3}],
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(InvalidSettingError, match=next(iter(bad))):
        cn.Distillation(**bad)


def test_images_are_flipped_and_shifted():
    images = torch.arange(2 * 3 * 16 * 16.0).reshape(2, 3, 16, 16).repeat(20, 1, 1, 1)
    flipped = flip(images)
    kinds = [torch.equal(one, two) for one, two in zip(flipped, images, strict=True)]
    assert 0 < sum(kinds) < len(kinds)
    assert all(
        torch.equal(one, two if kept else two.flip(2)) for one, two, kept in zip(flipped, images, kinds, strict=True)
    )
    shifted = shift(images)
    assert shifted.shape == images.shape
    corners = {float(each[0, 5, 5] - original[0, 5, 5]) for each, original in zip(shifted, images, strict=True)}
    assert len(corners) > 3
    assert corners <= {16.0 * down + across for down in range(-2, 3) for across in range(-2, 3)}


def test_inputs_are_mixed_with_others_of_the_batch():
    rows = torch.eye(8)[:, :, None, None].expand(8, 8, 16, 16)
    for mixed in (blend(rows), paste(rows)):
        torch.testing.assert_close(mixed.sum(1), torch.ones(8, 16, 16))
    assert ((blend(rows)[:, :, 0, 0] > 0).sum(1) <= 2).all()
    pasted = paste(rows)
    assert set(pasted.unique().tolist()) == {0.0, 1.0}
    assert not torch.equal(pasted, rows)
    table = torch.rand(8, 3)
    assert choose_augmentation(table, "mixtures")(table).shape == table.shape
    with pytest.raises(InvalidSettingError, match="floating-point"):
        choose_augmentation(table.long(), "mixtures")


def test_what_layers_read_is_to_agree_as_well():
    """The input, which nothing changes, does not count."""
    original, smaller = (
        nn.Sequential(nn.Linear(6, 5), nn.Linear(5, width), nn.Linear(width, 4), nn.Linear(4, 3)) for width in (7, 2)
    )
    readers = StreamReader("0", last=False), StreamReader("1", last=False), StreamReader("3", last=True)
    inputs = torch.randn(9, 6)
    pair = Imitation(original, smaller, Aim(lambda found, wanted: 0 * found.sum(), readers))
    with torch.no_grad():
        stream, last = (
            square(smaller[:at](inputs), original[:at](inputs)) / original[:at](inputs).var(correction=0)
            for at in (1, 3)
        )
    expected = STREAMS * stream + LAST_LAYER * last
    torch.testing.assert_close(pair.compute_loss(inputs).detach(), expected)
    pair.compute_loss(inputs).backward()
    assert pair.smaller[0].weight.grad.abs().sum() > 0


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.inner, self.outer, self.head = (
            nn.Linear(*sizes) for sizes in ((6, 8), (8, 4), (4, 8), (8, 3))
        )

    def forward(self, x):
        stream = self.stem(x).relu()
        return self.head(stream + self.outer(self.inner(stream).relu()))


@pytest.mark.parametrize(("whole", "expected"), [("stem", ["stem", "inner", "head"]), ("inner", ["stem", "outer"])])
def test_readers_are_the_layers_that_lost_no_input(whole, expected):
    model, inputs = Residual(), torch.randn(40, 6)
    plan = cn.plan(cn.search(model, inputs, units=0.5, ignore=[whole], effort="quick"))
    readers = find_readers(cn.prune(model, plan), plan.structure, plan.stays)
    assert [each.module for each in readers] == expected
    assert [each.module for each in readers if each.last] == ["head"] * ("head" in expected)


def test_maps_are_augmented_unasked_and_only_colour_images_are_flipped():
    for inputs in (torch.rand(4, 1, 4, 4), torch.rand(4, 3), torch.rand(4, 3, 50), (torch.rand(4, 3, 16, 16),)):
        assert choose_augmentation(inputs, "auto")(inputs) is inputs
    places = torch.arange(16.0).expand(40, 1, 16, 16).contiguous()
    for _ in range(8):
        assert torch.allclose(choose_augmentation(places, "auto")(places), places), "not flipped or shifted"
    levels = torch.arange(40.0)[:, None, None, None].expand(40, 1, 16, 16)
    mixed = [choose_augmentation(levels, "auto")(levels) for _ in range(16)]
    kinds = {torch.equal(each, each.round()) for each in mixed}
    assert kinds == {True, False}, "pasted in some batches, blended in others"
    assert not any(torch.equal(each, levels) for each in mixed)
    images = torch.rand(40, 3, 16, 16)
    assert not torch.equal(choose_augmentation(images, "auto")(images), images)
    assert choose_augmentation(images, "none")(images) is images
    with pytest.raises(InvalidSettingError, match="height"):
        choose_augmentation(torch.rand(4, 3), "images")


def test_probabilities_are_compared_by_their_logarithms():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        sizes, layers = (6, 24, 24), []
        for before, after in pairwise(sizes):
            layers += [nn.Linear(before, after), nn.ReLU()]
        model = nn.Sequential(*layers, nn.Linear(24, 3), nn.Softmax(1)).eval()
        with torch.no_grad():
            for values in model.parameters():
                values.mul_(3)
        inputs, fresh = torch.randn(200, 6), torch.randn(400, 6)
    plan = halve(model, inputs)
    plain, trained = (
        cn.prune(model, plan, inputs, compensate=each) for each in ("least_squares", cn.Distillation(steps=100))
    )
    with torch.no_grad():
        before, after = (square(each(fresh).log(), model(fresh).log()) for each in (plain, trained))
    assert after < before
