import copy
import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import critical_neurons as cn
from critical_neurons.cli.digits import split_digits
from critical_neurons.core.batch import digest_rows
from critical_neurons.errors import (
    InvalidFileError,
    InvalidInputError,
    InvalidSettingError,
    OutputError,
    UnreadableModelError,
)
from critical_neurons.io.builtin_models import fc3, lenet5, vgg16
from critical_neurons_reproduction.decoupled import (
    Decoupled,
    build_head,
    decouple,
    join_scores,
    run_to,
    score_parts,
    train_part,
    train_parts,
)
from critical_neurons_reproduction.decoupled.part_training import count_epochs
from critical_neurons_reproduction.recipes import Recipe
from tests.zoo import first_or_slow

SCORE_TOLERANCE = 2e-6
"""Scores are rounded to six decimals."""

BATCH = 32
RECIPE = Recipe("adam", 1e-2, epochs=1, batch_size=BATCH)


def tiny_network(*extra: nn.Module) -> nn.Sequential:
    """Three convolutions, with and without batch norm and pooling, on digits of 8x8 pixels."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1),
        nn.ReLU(),
        *extra,
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 16),
        nn.ReLU(),
        nn.Linear(16, 10),
    )


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    (inputs, labels), _ = split_digits(0)
    return inputs[:192], labels[:192]


@pytest.fixture(scope="module")
def trained(digits) -> Decoupled:
    decoupled = decouple(tiny_network(), digits[0], hidden=16)
    train_parts(decoupled, *digits, Recipe("adam", 3e-3, epochs=10, batch_size=BATCH))
    return decoupled


@pytest.fixture(scope="module")
def scored(trained, digits) -> cn.Scores:
    return score_parts(trained, digits[0][:10], digits[1][:10])


def interrupt(*_):
    raise KeyboardInterrupt


def states(decoupled: Decoupled) -> list[dict[str, torch.Tensor]]:
    return [copy.deepcopy(dict(part.network.state_dict())) for part in decoupled.parts]


def same(first, second) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first.keys() | second.keys())


@pytest.mark.parametrize("factory", [lenet5, vgg16])
def test_one_part_per_convolution_and_together_they_are_the_network(factory):
    model, example = factory(), torch.randn(2, 3, 32, 32)
    decoupled = decouple(model.eval(), example)
    names = [name for name, module in model.named_children() if isinstance(module, nn.Conv2d)]
    assert [part.name for part in decoupled.parts] == names
    assert [name for part in decoupled.parts for name, _ in part.body.named_children()] == [
        name for name, _ in model.named_children()
    ]
    values = example
    with torch.no_grad():
        for part in decoupled.parts:
            assert part.network.eval()(values).shape == (2, 10)
            values = part.body(values)
        assert torch.equal(values, model(example))
    assert len(decoupled.parts[-1].head) == 0


@pytest.mark.parametrize(
    ("shape", "sides"),
    [
        ((64, 32, 32), [8, 2]),
        ((64, 16, 16), [4, 2]),
        ((256, 8, 8), [2]),
        ((512, 4, 4), [1]),
        ((512, 2, 2), [1]),
        ((120, 1, 1), []),
        ((6, 14, 14), [3, 2]),
    ],
)
def test_a_head_shrinks_the_map_by_four_and_then_to_two_as_far_as_it_goes(shape, sides):
    head = build_head(shape, 7, hidden=5)
    assert [module.output_size for module in head if isinstance(module, nn.AdaptiveAvgPool2d)] == [
        (side, side) for side in sides
    ]
    last = (sides or [1])[-1]
    linear = [tuple(module.weight.shape) for module in head if isinstance(module, nn.Linear)]
    assert linear == [(5, shape[0] * last * last), (7, 5)]
    assert head.eval()(torch.randn(3, *shape)).shape == (3, 7)


def test_a_head_as_wide_as_the_authors():
    widths = [build_head((channels, 8, 8), 10, hidden=None)[-1].in_features for channels in (3, 8)]
    assert widths == [12, 32]


def test_heads_follow_from_the_seed_and_the_given_model_stays_as_it_is(digits):
    model = tiny_network().eval()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first, again, other = (decouple(model, digits[0], seed=seed) for seed in (1, 1, 2))
    train_parts(first, *digits, RECIPE)
    assert torch.equal(torch.get_rng_state(), random)
    assert same(model.state_dict(), before)
    assert not model.training
    fresh = decouple(model, digits[0], seed=1)
    assert all(map(same, states(again), states(fresh)))
    assert not same(again.parts[0].network.state_dict(), other.parts[0].network.state_dict())


@pytest.mark.parametrize("mixed", [True, False])
def test_mixed_precision_multiplies_in_bfloat16(mixed, digits):
    part = decouple(tiny_network(), digits[0]).parts[0]
    recipe = replace(RECIPE, mixed_precision=mixed)
    batch = digits[0][:BATCH], digits[1][:BATCH]
    _, leaving = train_part(part, recipe.build_optimiser(part.network.parameters()), recipe, batch)
    assert leaving.dtype == (torch.bfloat16 if mixed else torch.float32)
    assert {weights.dtype for weights in part.network.parameters()} == {torch.float32}


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_step_of_one_part_leaves_the_others_bit_identical(index, digits):
    decoupled = decouple(tiny_network(), digits[0])
    before, values = states(decoupled), digits[0][:BATCH]
    with torch.no_grad():
        for part in decoupled.parts[:index]:
            values = copy.deepcopy(part.body)(values)
    part = decoupled.parts[index]
    optimiser = RECIPE.build_optimiser(part.network.parameters())
    _, leaving = train_part(part, optimiser, RECIPE, (values, digits[1][:BATCH]))
    assert not leaving.requires_grad
    assert [same(*pair) for pair in zip(before, states(decoupled), strict=True)] == [
        other != index for other in range(3)
    ]


@pytest.mark.parametrize("buffer_size", first_or_slow(3, 1))
def test_no_part_depends_on_a_later_one(buffer_size, digits):
    first, second = (decouple(tiny_network(), digits[0]) for _ in range(2))
    with torch.no_grad():
        for values in second.parts[1].network.parameters():
            values.mul_(1.5)
    for decoupled in (first, second):
        train_parts(decoupled, *digits, RECIPE.shortened(2), buffer_size=buffer_size)
    assert [same(*pair) for pair in zip(states(first), states(second), strict=True)] == [True, False, False]


def test_a_buffer_of_one_is_one_batch_after_another_through_all_parts(digits):
    decoupled, expected = (decouple(tiny_network(), digits[0]) for _ in range(2))
    train_parts(decoupled, *digits, RECIPE.shortened(2), seed=3)
    optimisers = [RECIPE.build_optimiser(part.network.parameters()) for part in expected.parts]
    for part in expected.parts:
        part.network.to(memory_format=torch.channels_last)
    for epoch in range(2):
        order = np.random.default_rng((3, epoch)).permutation(len(digits[1]))
        for rows in np.split(order, len(order) // BATCH):
            values, labels = digits[0][rows].contiguous(memory_format=torch.channels_last), digits[1][rows]
            for part, optimiser in zip(expected.parts, optimisers, strict=True):
                optimiser.zero_grad()
                leaving = part.body.train()(values)
                functional.cross_entropy(part.head.train()(leaving), labels).backward()
                optimiser.step()
                values = leaving.detach()
    assert all(map(same, states(decoupled), states(expected)))


def test_a_larger_buffer_trains_otherwise_and_threads_change_nothing(digits):
    plain, replayed, threaded = (decouple(tiny_network(), digits[0]) for _ in range(3))
    train_parts(plain, *digits, RECIPE)
    train_parts(replayed, *digits, RECIPE, buffer_size=4)
    train_parts(threaded, *digits, RECIPE, buffer_size=4, threads=2)
    assert [same(*pair) for pair in zip(states(plain), states(replayed), strict=True)] == [True, False, False]
    assert all(map(same, states(replayed), states(threaded)))


def test_early_parts_are_frozen_early(digits):
    """Each part trains for its own epochs and is left alone from then on."""
    recipe = replace(RECIPE, epochs=4, annealing="linear", freeze_from=0.25)
    assert count_epochs(recipe, 3) == [1, 3, 4]
    assert count_epochs(replace(recipe, freeze_from=1.0), 3) == [4, 4, 4]
    decoupled, after = decouple(tiny_network(), digits[0]), []
    losses = train_parts(decoupled, *digits, recipe, progress=lambda *_: after.append(states(decoupled)))
    changed = [
        [not same(*pair) for pair in zip(before, now, strict=True)] for before, now in itertools.pairwise(after)
    ]
    assert changed == [[False, True, True], [False, True, True], [False, False, True]]
    assert len({each[0] for each in losses}) == 1


@pytest.mark.parametrize("buffer_size", first_or_slow(3, 1))
def test_parts_learn(buffer_size, digits):
    decoupled, reported = decouple(tiny_network(), digits[0]), []
    losses = train_parts(
        decoupled,
        *digits,
        RECIPE.shortened(8),
        buffer_size=buffer_size,
        progress=lambda epoch, losses: reported.append((epoch, losses)),
    )
    assert reported == list(enumerate(losses, 1))
    assert all(last < 0.7 * first for first, last in zip(losses[0], losses[-1], strict=True))
    assert not any(module.training for module in decoupled.model.modules())


@pytest.mark.parametrize("buffer_size", first_or_slow(3, 1))
def test_training_resumes_bit_identical(tmp_path, buffer_size, digits):
    path = tmp_path / "training.pt"
    model = tiny_network(nn.Dropout(0.2))
    recipe = replace(RECIPE, epochs=3, augmented=True, annealing="one_cycle", freeze_from=0.4, mixed_precision=True)
    settings = {"buffer_size": buffer_size, "seed": 5}
    whole, begun, resumed = (decouple(model, digits[0]) for _ in range(3))
    expected = train_parts(whole, *digits, recipe, **settings)
    with pytest.raises(KeyboardInterrupt):
        train_parts(begun, *digits, recipe, **settings, checkpoint=path, progress=interrupt)
    torch.rand(7)
    assert train_parts(resumed, *digits, recipe, **settings, checkpoint=path) == expected
    assert all(map(same, states(resumed), states(whole)))
    assert torch.load(path, weights_only=True)["losses"] == [list(each) for each in expected]
    done = decouple(model, digits[0], seed=9)
    assert train_parts(done, *digits, recipe, **settings, checkpoint=path) == expected
    assert all(map(same, states(done), states(whole)))
    assert [each.name for each in tmp_path.iterdir()] == ["training.pt"]


@pytest.mark.parametrize("steps", [3, 8])
def test_training_stopped_within_an_epoch_goes_on_from_where_that_began(tmp_path, steps, digits):
    whole, stopped = (decouple(tiny_network(), digits[0]) for _ in range(2))
    expected = train_parts(whole, *digits, RECIPE.shortened(2), buffer_size=2)
    train = functools.partial(train_parts, recipe=RECIPE.shortened(2), buffer_size=2, checkpoint=tmp_path / "t.pt")
    left = iter(range(steps))

    def stop(*_):
        if next(left, None) is None:
            raise KeyboardInterrupt

    hook = stopped.parts[1].body[0].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, *digits)
    hook.remove()
    assert train(stopped, *digits) == expected
    assert all(map(same, states(stopped), states(whole)))


def test_a_checkpoint_of_another_training_is_refused(tmp_path, digits):
    path = tmp_path / "training.pt"
    train = functools.partial(train_parts, recipe=RECIPE, checkpoint=path)
    train(decouple(tiny_network(), digits[0]), *digits)
    before = path.read_bytes()
    decoupled = decouple(tiny_network(), digits[0])
    initial = states(decoupled)
    for change, name in [
        ({"seed": 1}, "seed"),
        ({"buffer_size": 2}, "buffer_size"),
        ({"recipe": replace(RECIPE, learning_rate=3e-3)}, "recipe"),
    ]:
        with pytest.raises(InvalidFileError, match=f"differs in {name}"):
            train(decoupled, *digits, **change)
    with pytest.raises(InvalidFileError, match="differs in data"):
        train(decoupled, digits[0] + 1, digits[1])
    with pytest.raises(InvalidFileError, match="differs in architecture"):
        train(decouple(tiny_network(), digits[0], hidden=3), *digits)
    assert all(map(same, states(decoupled), initial))
    assert path.read_bytes() == before
    path.write_bytes(before[:100])
    with pytest.raises(InvalidFileError, match="damaged"):
        train(decoupled, *digits)
    torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(InvalidFileError, match="not a file of"):
        train(decoupled, *digits)
    with pytest.raises(OutputError, match="does not exist"):
        train(decoupled, *digits, checkpoint=tmp_path / "missing" / "training.pt")


def test_scores_put_together_are_those_of_the_parts(trained, scored, digits):
    inputs, labels = digits[0][:10].double(), digits[1][:10]
    assert list(scored) == ["0", "4", "6", "11"]
    assert len(scored.parts) == 3
    for part, single in zip(trained.parts, scored.parts, strict=True):
        layers = cn.inspect(part.network, inputs).layers
        alone = cn.score(
            part.network, inputs, labels, ignore=[layer.name for layer in layers if layer.name.startswith("head.")]
        )
        assert list(alone) == list(single)
        for name in single:
            assert np.array_equal(single[name], alone[name])
            assert np.array_equal(scored[name.removeprefix("body.")], alone[name])
        assert single.seconds > 0
        inputs = run_to(part, inputs)
    assert (scored.objective, scored.bound, scored.history) == (None, None, ())
    assert scored.gap == max(single.gap for single in scored.parts)
    assert any((scored[name] < 1).any() for name in ("0", "4", "6"))


def test_the_last_part_is_the_span_of_the_network_that_begins_with_it(trained, scored, digits):
    span = cn.score(trained.model, digits[0][:10], digits[1][:10], start="6")
    for name in ("6", "11"):
        assert np.allclose(scored[name], span[name], atol=SCORE_TOLERANCE, rtol=0)


def test_scores_of_parts_plan_prune_and_travel_like_any_others(tmp_path, trained, scored, digits):
    plan = cn.plan(scored, threshold=0.5)
    smaller = cn.prune(trained.model, plan, digits[0][:4])
    assert plan.seen == frozenset(digest_rows(digits[0][:10].numpy()))
    sizes = [len(module.weight) for module in smaller if isinstance(module, nn.Conv2d | nn.Linear)]
    assert sizes == [*(int((scored[name] >= 0.5).sum()) for name in scored), 10]
    assert sum(sizes) < 6 + 8 + 8 + 16 + 10
    scored.save(tmp_path / "scores.json")
    loaded = cn.Scores.load(tmp_path / "scores.json")
    assert loaded.to_dict() == scored.to_dict()


def test_the_settings_of_score_hold_for_every_part_and_the_worst_status_is_kept(trained, digits):
    reported = []
    found = score_parts(
        trained,
        digits[0][:10],
        digits[1][:10],
        formulation=cn.Paper(loss_weight=1.0, input_radius=1e-5, integer=False),
        progress=lambda name, scores: reported.append((name, scores)),
    )
    assert [name for name, _ in reported] == ["0", "4", "6"]
    assert tuple(scores for _, scores in reported) == found.parts
    expected = cn.Paper(loss_weight=1.0, input_radius=1e-5, integer=False)
    assert all(part.settings["formulation"] == expected for part in (found, *found.parts))
    stopped = score_parts(trained, digits[0][:10], digits[1][:10], score=_stop_second())
    assert [part.status for part in stopped.parts].count(cn.Status.OPTIMAL) == 2
    assert stopped.status is cn.Status.FEASIBLE


def test_the_bounds_of_a_part_are_those_of_the_whole_network_there(trained, digits):
    inputs, whole = digits[0][:10], cn.read_network(trained.model, digits[0])
    radius = 1e-3
    expected = bounds_by_layer(cn.bound_network(whole, inputs.double().numpy(), radius=radius), whole)
    calls = record_calls(trained, digits, box="image", input_radius=radius)
    assert len(calls) == len(trained.parts)
    entering, found = inputs.double(), {}
    for part, (model, read, settings) in zip(trained.parts, calls, strict=True):
        assert torch.equal(read, entering)
        network = cn.read_network(model, entering, ignore=settings["ignore"])
        found |= bounds_by_layer(settings["formulation"].bounds, network, "body.")
        settings["formulation"].bounds.check(network)
        entering = run_to(part, entering)
    assert list(found) == list(expected)
    for name, interval in expected.items():
        assert np.allclose(found[name].lower, interval.lower, atol=1e-12, rtol=0)
        assert np.allclose(found[name].upper, interval.upper, atol=1e-12, rtol=0)


@pytest.mark.slow
def test_whatever_the_image_is_in_its_box_every_part_stays_within_its_bounds(trained, digits):
    radius = 0.05
    calls = record_calls(trained, digits, box="image", input_radius=radius)
    for _ in range(5):
        entering = digits[0][:10].double()
        entering = entering + radius * (2 * torch.rand_like(entering) - 1)
        for part, (model, _, settings) in zip(trained.parts, calls, strict=True):
            network, bounds = (
                cn.read_network(model, entering, ignore=settings["ignore"]),
                settings["formulation"].bounds,
            )
            values = network.evaluate(entering.numpy())
            for index, interval in bounds.before_relu.items():
                read = values[network.ops[index].source]
                assert np.all((interval.lower <= read) & (read <= interval.upper))
            entering = run_to(part, entering)


def test_a_box_of_the_part_and_no_box_leave_the_bounds_to_score(trained, digits):
    for settings in ({"box": "part", "input_radius": 1e-3}, {"box": "image", "input_radius": 0.0}):
        calls = record_calls(trained, digits, **settings)
        assert {given["formulation"].bounds for _, _, given in calls} == {"interval"}
    with pytest.raises(InvalidSettingError, match="box: found 'network'"):
        score_parts(trained, digits[0][:5], digits[1][:5], box="network")
    own = cn.bound_network(cn.read_network(trained.model, digits[0]), digits[0][:5].double().numpy())
    with pytest.raises(InvalidSettingError, match="bounds: found Bounds"):
        score_parts(trained, digits[0][:5], digits[1][:5], formulation=cn.Paper(bounds=own))


def record_calls(decoupled, digits, *, box, input_radius):
    """What `score_parts` hands to `score`, part by part: model, inputs, settings."""
    calls = []

    def score(model, inputs, labels, **given):
        calls.append((model, inputs, given))
        return cn.score(model, inputs, labels, solver=cn.Solver(gap=1.0), **given)

    formulation = cn.Paper(input_radius=input_radius, integer=False)
    score_parts(decoupled, digits[0][:10], digits[1][:10], formulation=formulation, score=score, box=box)
    return calls


def bounds_by_layer(bounds, network, prefix=""):
    names = {index: network.ops[index].name for index in bounds.before_relu}
    return {
        name.removeprefix(prefix): bounds.before_relu[index]
        for index, name in names.items()
        if name.startswith(prefix)
    }


def test_heads_are_scored_if_wanted_and_left_out_of_the_whole(trained, scored, digits):
    found = score_parts(trained, digits[0][:10], digits[1][:10], score_heads=True)
    assert list(found) == list(scored)
    heads = [[name for name in part if name.startswith("head.")] for part in found.parts]
    assert heads == [["head.1", "head.5"], ["head.1", "head.5"], []]
    for name, part in zip("046", found.parts, strict=True):
        assert np.array_equal(found[name], part[f"body.{name}"])
    assert any((part["head.1"] < 1).any() for part in found.parts[:2])


@pytest.mark.slow
def test_parts_on_processes_give_the_same_scores(trained, scored, digits):
    found = score_parts(trained, digits[0][:10], digits[1][:10], workers=cn.Workers(2))
    assert [part.objective for part in found.parts] == [part.objective for part in scored.parts]
    assert all((found[name] == scored[name]).all() for name in scored)


def _stop_second():
    """`cn.score`, with no time for the second part."""
    calls = iter([300.0, 1e-9, 300.0])

    def score(*args, **settings):
        return cn.score(*args, **settings, solver=cn.Solver(time_limit=next(calls)))

    return score


def test_a_convolution_that_the_network_leaves_alone_is_not_scored_by_its_part(digits):
    """A batch norm behind a ReLU and before zero padding: its constant could not be folded."""
    model = tiny_network(nn.BatchNorm2d(8)).eval()
    nn.init.normal_(model[6].bias)
    found = score_parts(decouple(model, digits[0]), digits[0][:5], digits[1][:5])
    assert list(found) == ["0", "7", "12"]
    assert len(found.parts) == 2
    assert list(found) == [layer.name for layer in cn.read_network(model, digits[0]).removable]


def test_parts_that_do_not_cover_the_network_are_refused(trained, scored, digits):
    network = cn.read_network(trained.model, digits[0])
    with pytest.raises(UnreadableModelError, match="the parts score 0, 4, the network 0, 4, 6, 11"):
        join_scores(network, scored.parts[:2], settings={}, inputs=(), seconds=0.0)


def test_scoring_without_labels_or_units_is_refused(trained, digits):
    with pytest.raises(InvalidInputError, match="give the labels"):
        score_parts(trained, digits[0][:5])
    linear = decouple(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 10)), digits[0])
    with pytest.raises(InvalidInputError, match="nothing to score"):
        score_parts(linear, digits[0][:5], digits[1][:5])


def test_a_relu_that_stands_in_several_places_is_fine(digits):
    relu = nn.ReLU()
    layers = [nn.Conv2d(1, 2, 3), relu, nn.Conv2d(2, 2, 3), relu, nn.Flatten(), nn.Linear(32, 10)]
    decoupled = decouple(nn.Sequential(*layers), digits[0])
    assert [list(part.body._modules) for part in decoupled.parts] == [["0", "1"], ["2", "3", "4", "5"]]
    assert list(score_parts(decoupled, digits[0][:5], digits[1][:5])) == ["0", "2"]


def test_networks_that_cannot_be_cut_are_refused(digits):
    with pytest.raises(UnreadableModelError, match="no convolution"):
        decouple(fc3(), torch.zeros(1, 3, 32, 32))
    with pytest.raises(UnreadableModelError, match="found Conv2d"):
        decouple(nn.Conv2d(1, 1, 1), digits[0])
    with pytest.raises(UnreadableModelError, match="0: a convolution inside Sequential"):
        decouple(nn.Sequential(tiny_network()), digits[0])
    shared = nn.Conv2d(1, 1, 3, padding=1)
    with pytest.raises(UnreadableModelError, match="1: a layer used twice"):
        decouple(nn.Sequential(shared, shared, nn.Flatten()), digits[0])
    with pytest.raises(InvalidInputError, match="does not run on inputs of shape"):
        decouple(tiny_network(), torch.zeros(2, 3, 8, 8))
    with pytest.raises(InvalidInputError, match=r"logits \(batch, classes\)"):
        decouple(nn.Sequential(nn.Conv2d(1, 2, 3)), digits[0])
    with pytest.raises(InvalidSettingError, match="hidden"):
        decouple(tiny_network(), digits[0], hidden=0)
    with pytest.raises(InvalidInputError, match="height, width"):
        build_head((4,), 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe": replace(RECIPE, batch_size=1)}, "batch_size: found 1"),
        ({"buffer_size": 0}, "buffer_size: found 0"),
        ({"seed": -1}, "seed: found -1"),
        ({"threads": 2}, "6 .Dropout. draws random numbers"),
        ({"recipe": Recipe("sgd", 1e30, epochs=1, batch_size=BATCH)}, "loss of part 0 is nan in epoch 1"),
    ],
)
def test_bad_settings_are_refused(change, message, digits):
    decoupled = decouple(tiny_network(nn.Dropout(0.1)), digits[0])
    with pytest.raises(InvalidSettingError, match=message):
        train_parts(decoupled, *digits, **{"recipe": RECIPE, **change})


def test_labels_that_do_not_fit_are_refused(digits):
    decoupled = decouple(tiny_network(), digits[0])
    with pytest.raises(InvalidInputError, match="one per input"):
        train_parts(decoupled, digits[0], digits[1][:5], RECIPE)
    with pytest.raises(InvalidInputError, match="Accepted: 0 to 9"):
        train_parts(decoupled, digits[0], digits[1] + 1, RECIPE)
    with pytest.raises(InvalidInputError, match=r"found torch.int32"):
        train_parts(decoupled, digits[0], digits[1].int(), RECIPE)
    with pytest.raises(InvalidInputError, match="does not run on shape"):
        train_parts(decoupled, digits[0][:, :, :2, :2], digits[1], RECIPE)
    with pytest.raises(InvalidInputError, match="two or more"):
        train_parts(decoupled, digits[0][:1], digits[1][:1], RECIPE)
