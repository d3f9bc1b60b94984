"""Spans: a part of a model is read and scored; what lies before and behind it is run as it is."""

from __future__ import annotations

import copy
import json
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import critical_neurons as cn
from critical_neurons.core.linear_suffix import Tail
from critical_neurons.core.span import Span
from critical_neurons.errors import InvalidInputError, InvalidSettingError, UnreadableModelError
from critical_neurons.formulations import encode_literal
from critical_neurons.readers import forward_pass, read_network, run_model
from tests.settings import settle
from tests.zoo import first_or_slow

SAME_LOGITS = 1e-9
"""Largest difference between the model's own logits and those of its program with every score at 1."""

SAME_OUTPUTS = 1e-9
"""Largest difference between the outputs of the masked and of the smaller model in float64."""

SAME_OBJECTIVE = 1e-6
"""Largest relative difference between the objectives of two programs that are the same."""

STEP = 1e-6
"""Of finite differences."""

SAME_SLOPE = 1e-6
"""Largest relative difference between a slope and a finite difference."""

QUICK = {"threads": 1, "time_limit": 30.0}
FAST = {"formulation": "linearised", **QUICK}


class Stem(nn.Module):
    """Cannot be read for its layer norm and its GELU, nor traced for its assertion."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.LayerNorm([3, 6, 6])

    def forward(self, x):
        assert len(x) > 0
        return F.gelu(self.norm(self.convolution(x)))


class Head(nn.Module):
    """Attention over the positions, and control flow that depends on values."""

    def __init__(self, channels, softmax=False):
        super().__init__()
        self.logits = nn.Linear(channels, 3)
        self.softmax = softmax

    def forward(self, x):
        tokens = x.flatten(2).transpose(1, 2)
        if tokens.abs().max() > 1e6:
            tokens = tokens / 2
        attended = (tokens @ tokens.transpose(1, 2)).softmax(-1) @ tokens
        logits = self.logits((tokens + attended).mean(1))
        return logits.softmax(1) if self.softmax else logits


def make_body():
    return nn.Sequential(
        *(nn.Conv2d(3, 5, 3, padding=1), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Conv2d(5, 6, 3, padding=1), nn.ReLU(inplace=True), nn.Conv2d(6, 4, 1), nn.ReLU(inplace=True)),
    )


class Hybrid(nn.Module):
    def __init__(self, softmax=False):
        super().__init__()
        self.stem, self.body, self.head = Stem(), make_body(), Head(4, softmax)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


def build(make, seed=0):
    torch.manual_seed(seed)
    return make().double().eval()


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mlp(*sizes, behind=()):
    layers = []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1], *behind)


HYBRID = build(Hybrid)
IMAGES, LABELS = draw(6, 1, 6, 6), torch.tensor([0, 1, 2, 0, 1, 2])
BODY = {"start": "body", "stop": "body"}


def encode_span(model, inputs, labels, encode=cn.encode, radius=0.0, **span):
    network = read_network(model, inputs, **span)
    passage = run_model(model, inputs.numpy(), network.span)
    bounds = cn.bound_network(network, passage.inputs, radius=radius)
    return passage, encode(network, bounds, labels.numpy(), cn.Objective(), tail=passage.tail)


def refuse(model, inputs, error=InvalidSettingError, labels=None, **settings):
    with pytest.raises(error) as caught:
        cn.score(model, inputs, labels, **settle(**settings, **QUICK))
    return str(caught.value)


class Forward(nn.Module):
    """Layers of width 4 and a forward of one's own."""

    def __init__(self, forward, **modules):
        super().__init__()
        for name in "abc":
            self.add_module(name, nn.Linear(4, 4))
        self.last = nn.Linear(4, 3)
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)


def test_what_is_read_of_a_model_that_cannot_be_read():
    network = read_network(HYBRID, IMAGES, **BODY)
    assert network.input_shape == (3, 6, 6)
    assert network.span == Span("body", "body")
    assert [(layer.name, layer.reason) for layer in network.layers] == [
        ("body.0", ""),
        ("body.4", ""),
        ("body.6", "it feeds what follows the span"),
    ]
    assert "what comes before body is run as it is" in str(network)
    assert "nothing is certified about the whole network's loss" in str(network)


@pytest.mark.parametrize("encode", [cn.encode, encode_literal])
@pytest.mark.parametrize("radius", [0.0, 0.05])
def test_with_scores_at_one_the_logits_are_the_model_s_own(encode, radius):
    _, program = encode_span(HYBRID, IMAGES, LABELS, encode, radius, **BODY)
    with torch.no_grad():
        expected = HYBRID(IMAGES).numpy()
    assert np.abs(program.term.logits(program.unpruned) - expected).max() <= SAME_LOGITS


def test_the_tail_is_the_derivative_of_what_follows():
    passage, tail_end = run_model(HYBRID, IMAGES.numpy(), Span(**BODY)), HYBRID.head
    with torch.no_grad():
        leaving = HYBRID.body(HYBRID.stem(IMAGES)).clone()
        direction = draw(*leaving.shape, seed=1)
        ahead, back = (tail_end(leaving + step * direction) for step in (STEP, -STEP))
    expected = ((ahead - back) / (2 * STEP)).numpy()
    found = passage.tail.apply(direction.numpy()) - passage.tail.offset
    assert np.abs(found - expected).max() <= SAME_SLOPE * np.abs(expected).max()
    assert np.abs(passage.tail.apply(leaving.numpy()) - passage.logits).max() <= SAME_LOGITS


@pytest.mark.parametrize("encode", [cn.encode, encode_literal])
def test_tangents_are_finite_differences_of_the_expansion(encode):
    _, program = encode_span(HYBRID, IMAGES, LABELS, encode, 0.05, **BODY)
    generator = np.random.default_rng(0)
    point = generator.uniform(size=program.column_count)
    rows = program.term.cuts(point, np.arange(len(LABELS)))
    scores = np.eye(program.blocks["score"].stop, program.column_count)
    anywhere = generator.normal(size=(3, program.column_count))
    anywhere[:, program.term.columns] = 0.0
    directions = np.concatenate([scores, anywhere])
    differences = [
        (program.term.values(point + STEP * direction) - program.term.values(point - STEP * direction)) / (2 * STEP)
        for direction in directions
    ]
    slopes = -(rows.matrix @ directions.T)
    assert np.abs(slopes[:, :-3]).max() > 1e-3 or encode is encode_literal  # whose logits are those of activations
    assert np.abs(slopes - np.stack(differences, axis=1)).max() <= SAME_SLOPE * np.abs(slopes).max()


def test_adjoint_of_a_tail():
    generator = np.random.default_rng(0)
    tail = Tail(generator.normal(size=(4, 3)), generator.normal(size=(4, 3, 10)))
    values, seeds = generator.normal(size=(4, 2, 5)), generator.normal(size=(2, 3))
    samples = np.array([3, 1])
    forward = ((tail.apply(values) - tail.offset)[samples] * seeds).sum(axis=1)
    back = (tail.adjoint(seeds, samples) * values.reshape(4, -1)[samples]).sum(axis=1)
    assert forward == pytest.approx(back)
    some = tail.choose(np.array([False, True, False, True]))
    assert np.array_equal(some.apply(values[[1, 3]]), tail.apply(values)[[1, 3]])


SETTINGS = {
    "paper": {},
    "with a radius": {"input_radius": 1e-3, "integer": False},
    "by class": {"by_class": True},
    "linearised": {"formulation": "linearised"},
    "budget": {"formulation": "linearised", "budget": cn.Budget(macs=0.5)},
    "searched loss weight": {"formulation": "linearised", "loss_weight": cn.Bisection(0.5)},
}


@pytest.mark.parametrize("case", first_or_slow(*SETTINGS, first=3))
def test_scores_plans_and_smaller_models(case, tmp_path):
    scores = cn.score(HYBRID, IMAGES, LABELS, **settle(**BODY, **SETTINGS[case], **QUICK))
    assert list(scores) == ["body.0", "body.4"]
    assert scores.logit_error <= SAME_LOGITS
    assert scores.span == Span("body", "body")
    assert any("nothing is certified about the whole network's loss" in note for note in scores.notes)
    plan = cn.plan(scores, units=0.5)
    for chosen in (plan, plan.random(seed=3), plan.critical(scores)):
        chosen.save(tmp_path / "plan.json")
        loaded = cn.Plan.load(tmp_path / "plan.json")
        assert loaded.span == Span("body", "body")
        smaller, masked = cn.prune(HYBRID, loaded, IMAGES), cn.mask(HYBRID, loaded)
        assert [smaller.body[at].out_channels for at in (0, 4, 6)] == [2, 3, 4]
        fresh = draw(4, 1, 6, 6, seed=9)
        with torch.no_grad():
            assert (smaller(fresh) - masked(fresh)).abs().max() <= SAME_OUTPUTS
            assert (smaller(fresh) - HYBRID(fresh)).abs().max() > SAME_OUTPUTS


def test_scores_of_spans_survive_saving(tmp_path):
    scores = cn.score(HYBRID, IMAGES, LABELS, **settle(**BODY, **FAST))
    scores.save(tmp_path / "scores.json")
    plan = cn.plan(cn.Scores.load(tmp_path / "scores.json"), macs=0.5)
    assert plan.span == Span("body", "body")
    assert plan.rule.startswith("at most 0.5 of the macs of the span kept")


def test_a_plan_without_a_span_is_of_the_whole_model():
    plan = cn.plan(cn.score(build(lambda: mlp(4, 5, 3)), draw(3, 4), **settle(**FAST)), units=0.5)
    data = json.loads(json.dumps(plan.to_dict()))
    assert data["span"] == {"start": None, "stop": None}
    assert cn.Plan.from_dict(data).span.whole


def test_a_start_alone_is_the_rest_of_the_model_on_what_comes_before():
    model = build(lambda: mlp(4, 6, 7, 5, 3))
    inputs, labels = draw(5, 4), torch.tensor([0, 1, 2, 0, 1])
    rest = model[2:]
    with torch.no_grad():
        middle = model[:2](inputs)
    for settings in ({}, {"input_radius": 0.05}, {"formulation": "exact", "binary": True}):
        found = cn.score(model, inputs, labels, **settle(start="2", **settings, **QUICK))
        expected = cn.score(rest, middle, labels, **settle(**settings, **QUICK))
        assert list(found) == ["2", "4"]
        for ours, theirs in zip(found.values(), expected.values(), strict=True):
            assert np.array_equal(ours, theirs)
        assert found.objective == pytest.approx(expected.objective, rel=SAME_OBJECTIVE)
        assert found.bound == pytest.approx(expected.bound, rel=SAME_OBJECTIVE)


@pytest.mark.parametrize(("stop", "ignore"), [("6", ()), ("5", ("4",))])
@pytest.mark.parametrize("solver", ["highs", "cvxpy:CLARABEL"])
def test_a_stop_before_an_affine_end_changes_nothing(stop, ignore, solver):
    model = build(lambda: mlp(4, 6, 7, 5, 3))
    inputs, labels = draw(5, 4), torch.tensor([0, 1, 2, 0, 1])
    settings = {"solver": solver, **QUICK}
    found = cn.score(model, inputs, labels, **settle(stop=stop, **settings))
    expected = cn.score(model, inputs, labels, **settle(ignore=ignore, **settings))
    assert list(found) == list(expected)
    rough = 1e-3 if solver != "highs" else SAME_OBJECTIVE
    assert found.objective == pytest.approx(expected.objective, rel=rough)


def test_solvers_agree_on_a_span():
    model = build(lambda: nn.Sequential(nn.Tanh(), *mlp(4, 6, 5, 5), nn.Tanh(), nn.Linear(5, 3)))
    inputs, labels = draw(5, 4), torch.tensor([0, 1, 2, 0, 1])
    settings = {"start": "1", "stop": "5", "input_radius": 0.05, "integer": False, **QUICK}
    ours, theirs = (
        cn.score(model, inputs, labels, **settle(solver=solver, **settings)) for solver in ("highs", "cvxpy:CLARABEL")
    )
    assert theirs.objective == pytest.approx(ours.objective, rel=1e-3)
    assert theirs.logit_error <= SAME_LOGITS


def test_many_data_points_are_run_in_parts(monkeypatch):
    whole = run_model(HYBRID, IMAGES.numpy(), Span(**BODY))
    monkeypatch.setattr(forward_pass, "RUN_BATCH", 4)
    parts = run_model(HYBRID, IMAGES.numpy(), Span(**BODY))
    for found, expected in (
        (parts.inputs, whole.inputs),
        (parts.logits, whole.logits),
        (parts.tail.slopes, whole.tail.slopes),
    ):
        assert np.allclose(found, expected, rtol=0, atol=SAME_LOGITS)


def test_a_final_softmax_behind_the_span_is_left_out():
    plain = build(lambda: mlp(4, 5, 5, 3))
    ended = nn.Sequential(*plain, nn.Softmax(dim=1))
    inputs, labels = draw(5, 4), torch.tensor([0, 1, 2, 0, 1])
    expected = cn.score(plain, inputs, labels, **settle(stop="2", **QUICK))
    found = cn.score(ended, inputs, labels, **settle(stop="2", **QUICK))
    assert found.objective == pytest.approx(expected.objective, rel=SAME_OBJECTIVE)
    assert any("softmax" in note for note in found.notes)
    assert "Leave stop out" in refuse(ended, inputs, stop="5")


def test_probabilities_of_a_head_that_is_not_read_are_taken_back_to_logits():
    hidden = build(lambda: Hybrid(softmax=True))
    assert all(torch.equal(a, b) for a, b in zip(hidden.parameters(), HYBRID.parameters(), strict=True))
    expected = cn.score(HYBRID, IMAGES, LABELS, **settle(**BODY, **FAST))
    found = cn.score(hidden, IMAGES, LABELS, **settle(**BODY, **FAST))
    assert found.objective == pytest.approx(expected.objective, rel=SAME_OBJECTIVE)
    assert "the model returns probabilities: the program works on their logarithms" in found.notes


def test_names_of_functions_and_containers():
    def forward(model, x):
        x = torch.tanh(model.a(x))
        x = F.relu(model.b(F.relu(x)))
        x = F.relu(model.c(x))
        return model.last(torch.sigmoid(x))

    model, inputs = build(lambda: Forward(forward)), draw(5, 4)
    network = read_network(model, inputs, start="relu", stop="relu_2")
    assert [layer.name for layer in network.removable] == ["b"]
    assert cn.score(model, inputs, **settle(start="relu", stop="relu_2", **QUICK)).logit_error <= SAME_LOGITS
    nested = build(lambda: nn.Sequential(nn.Tanh(), nn.Sequential(mlp(4, 5, 4), nn.ReLU()), nn.Linear(4, 3)))
    for read in (read_network, cn.inspect):
        assert [layer.name for layer in read(nested, inputs, start="1").layers] == ["1.0.0", "1.0.2", "2"]
        assert [layer.name for layer in read(nested, inputs, start="1", stop="1.0").layers] == ["1.0.0", "1.0.2"]


def test_a_residual_block_within_the_span_is_a_single_path():
    def forward(model, x):
        x = torch.tanh(model.a(x))
        x = F.relu(x + model.c(F.relu(model.b(x))))
        return model.last(torch.sigmoid(x))

    model, inputs = build(lambda: Forward(forward)), draw(5, 4)
    network = read_network(model, inputs, start="b", stop="relu_1")
    assert [layer.name for layer in network.removable] == ["b"]
    assert cn.score(model, inputs, **settle(start="b", stop="relu_1", **QUICK)).logit_error <= SAME_LOGITS


PASTS = {
    "into it": (
        lambda m, x: m.last(F.relu(m.c(F.relu(m.b(F.relu(m.a(x))))) + x)),
        {"start": "b"},
        "start: add reads x, which does not come from what b reads. A span is a single path",
    ),
    "out of it": (
        lambda m, x: m.last(torch.tanh(m.c(F.relu(m.b(y := F.relu(m.a(x))))) + y)),
        {"stop": "c"},
        "stop: add reads relu, which does not come from what c gives. A span is a single path",
    ),
    "around it": (
        lambda m, x: m.last(torch.tanh(m.c(F.relu(m.b(y := torch.tanh(m.a(x))))) + y)),
        {"start": "b", "stop": "c"},
        "stop: add reads tanh, which does not come from what c gives. A span is a single path",
    ),
    "two values at its start": (
        lambda m, x: m.last(F.relu(m.c(m.a(x) + m.b(x)))),
        {"start": "add"},
        "start: add reads b, which does not come from what add reads. A span is a single path",
    ),
}


@pytest.mark.parametrize("case", PASTS)
def test_a_span_that_is_not_a_single_path_is_refused(case):
    forward, span, message = PASTS[case]
    assert refuse(build(lambda: Forward(forward)), draw(3, 4), **span).startswith(message)


def test_sizes_may_go_past_an_end():
    def forward(model, x):
        size = x.shape[0]
        tokens = model.token.expand(size, -1)
        x = F.relu(model.b(torch.tanh(model.a(x)).view(size, -1)))
        return model.last(torch.tanh(model.c(x)).view(size, -1) + tokens)

    def make():
        model = Forward(forward)
        model.token = nn.Parameter(torch.rand(1, 4))
        return model

    model, inputs = build(make), draw(3, 4)
    assert list(cn.score(model, inputs, **settle(start="b", stop="c", **QUICK))) == ["b"]


WRONG_NAMES = {
    "unknown": ({"start": "bodi"}, "start: 'bodi' is no module or call of the model. Names like it that are: body"),
    "unknown stop": ({"stop": "?"}, "stop: '?' is no module or call of the model. Names like it that are: stem"),
    "not called": ({**BODY, "start": "body.9"}, "start: 'body.9' is no module"),
    "a number": (
        {"start": 3},
        "start: found 3. Accepted: the name of a module as in model.named_modules(), or None.",
    ),
    "empty": ({"stop": ""}, "stop: found ''"),
    "the wrong way round": ({"start": "body.4", "stop": "body.0"}, "stop: body.0 does not follow body.4."),
}


@pytest.mark.parametrize("case", WRONG_NAMES)
def test_wrong_names(case):
    settings, message = WRONG_NAMES[case]
    assert message in refuse(HYBRID, IMAGES, **settings)


def test_a_module_inside_a_layer_of_torch_is_not_called_by_itself():
    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.attention = mlp(4, 5, 4), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x):
            x = self.first(x)[:, None]
            return self.attention(x, x, x)[0].flatten(1)

    model, inputs = build(Attentive), draw(3, 4)
    assert list(cn.score(model, inputs, **settle(stop="first", **QUICK))) == ["first.0"]
    message = refuse(model, inputs, start="attention.out_proj")
    assert message.startswith("start: 'attention.out_proj' is not called by itself in the forward.")


def test_a_branch_that_does_not_reach_the_output_is_no_span():
    model = build(lambda: Forward(lambda m, x: m.last(F.relu(m.b(x))) if m.a(x) is not None else x))
    assert "is not called by itself" in refuse(model, draw(3, 4), stop="a")
    assert "the model's output" not in refuse(model, draw(3, 4), start="a")


UNREADABLE = (
    "If it lies before or behind all that is to be scored, name the part in between with start= and stop=. "
    "cn.search and cn.compress need no program and work all the same."
)


def test_errors_about_what_cannot_be_read_name_the_way_out():
    gelu = nn.Sequential(nn.Linear(4, 4), nn.GELU(), *mlp(4, 5, 3)).double()
    assert refuse(gelu, draw(3, 4), UnreadableModelError).endswith(UNREADABLE)
    assert list(cn.score(gelu, draw(3, 4), **settle(start="2", **QUICK))) == ["2"]
    message = refuse(HYBRID, IMAGES, UnreadableModelError)
    assert "Hybrid: the forward of stem cannot be traced by torch.fx" in message
    assert message.endswith(UNREADABLE)


def test_what_lies_inside_must_be_read():
    message = refuse(HYBRID, IMAGES, UnreadableModelError, start="body")
    assert message.startswith("head: cannot read Head, whose forward torch.fx cannot trace (symbolically traced")
    message = refuse(HYBRID, IMAGES, UnreadableModelError, start="body", stop="head.logits")
    assert "the forward of head cannot be traced" in message


def test_a_call_that_torch_fx_cannot_write_down_is_made_part_of_the_module_around_it():
    class Choice(nn.Module):
        def forward(self, x, choose):
            return choose(x) if x.sum() > 0 else -choose(x)

    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.choice = Choice()

        def forward(self, x):
            return self.choice(x, object.__new__(Doubling))

    class Doubling:
        def __call__(self, x):
            return 2 * x

    model, inputs = build(lambda: nn.Sequential(Around(), *mlp(4, 5, 3))), draw(3, 4)
    assert list(cn.score(model, inputs, **settle(start="1", **QUICK))) == ["1"]
    assert "the forward of 0 cannot be traced" in refuse(model, inputs, UnreadableModelError, start="0.choice")


def test_exact_goes_with_a_start_but_not_with_a_stop():
    model, inputs = build(lambda: nn.Sequential(nn.Tanh(), *mlp(4, 3, 3))), draw(3, 4)
    assert cn.score(model, inputs, **settle(start="1", formulation="exact", **QUICK)).bound is not None
    assert "stop: the exact formulation" in refuse(model, inputs, stop="2", formulation="exact")
    network = read_network(model, inputs, start="1", stop="3")
    passage = run_model(model, inputs.numpy(), network.span)
    bounds = cn.bound_network(network, passage.inputs, pruned=True)
    with pytest.raises(InvalidSettingError, match="stop: the exact formulation"):
        cn.encode(network, bounds, np.zeros(3, int), formulation="exact", tail=passage.tail)


def test_a_tail_goes_with_a_network_that_stops():
    model, inputs = build(lambda: mlp(4, 3, 3)), draw(3, 4)
    for stop, tail in (("1", None), (None, run_model(model, inputs.numpy(), Span(stop="1")).tail)):
        network = read_network(model, inputs, stop=stop)
        with pytest.raises(InvalidSettingError, match=r"tail: found .* It goes with networks .* stop="):
            cn.encode(network, cn.bound_network(network, inputs.numpy()), np.zeros(3, int), tail=tail)


def test_labels_are_checked_against_the_classes_of_the_model():
    assert "labels: found 3. Accepted: 0 to 2" in refuse(
        HYBRID, IMAGES, InvalidInputError, labels=[0, 1, 2, 3, 0, 1], **BODY
    )


BAD_ENDS = {
    "argmax": (lambda x: F.one_hot(x.argmax(1), 3).double(), InvalidSettingError, "cannot be differentiated"),
    "mean over the batch": (lambda x: x - x.mean(0), UnreadableModelError, "mixes data points"),
    "not a number": (lambda x: x - x.log(), InvalidInputError, "the model has NaN or infinite values"),
    "infinite slope": (
        lambda x: x + (x - x.detach()).sqrt(),
        InvalidInputError,
        "the derivative of what follows 2 has NaN or infinite values",
    ),
    "another shape": (lambda x: x[:, :, None], UnreadableModelError, "returns a tensor of shape (3, 3, 1)"),
    "a tuple": (lambda x: (x, x), UnreadableModelError, "returns a tuple"),
}


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("case", BAD_ENDS)
def test_what_follows_must_be_a_differentiable_function_of_each_data_point(case):
    function, error, message = BAD_ENDS[case]
    model = build(lambda: mlp(4, 5, 5, 3, behind=[Apply(function)]))
    assert message in refuse(model, draw(3, 4), error, stop="2")


BAD_BEGINNINGS = {
    "not a number": (lambda x: (x - 2).log(), InvalidInputError, "what comes before 1 has NaN or infinite values"),
    "no batch": (lambda x: x.flatten().reshape(-1, 4)[:1], InvalidSettingError, "start: 1 reads shape (1, 4)"),
}


@pytest.mark.parametrize("case", BAD_BEGINNINGS)
def test_what_comes_before_must_give_a_tensor_of_numbers_per_data_point(case):
    function, error, message = BAD_BEGINNINGS[case]
    model = build(lambda: nn.Sequential(Apply(function), *mlp(4, 5, 3)))
    assert message in refuse(model, draw(3, 4), error, start="1")


def test_layers_that_share_weights_with_what_lies_outside_are_refused():
    before = build(lambda: Forward(lambda m, x: m.last(F.relu(m.b(F.relu(torch.tanh(m.b(x))))))))
    with pytest.raises(UnreadableModelError, match="b: this module is called more than once"):
        read_network(before, draw(3, 4), start="relu")
    after = build(lambda: Forward(lambda m, x: m.last(torch.tanh(m.a(m.c(F.relu(m.b(F.relu(m.a(x))))))))))
    assert "a lies outside the span and shares weights with a" in refuse(after, draw(3, 4), stop="c")
    tied = build(lambda: Forward(lambda m, x: m.last(torch.tanh(m.c(F.relu(m.b(F.relu(m.a(x)))))))))
    tied.c.weight = tied.a.weight
    assert "c lies outside the span and shares weights with a" in refuse(tied, draw(3, 4), stop="relu_1")


def test_weights_computed_by_hooks_may_lie_outside():
    stem = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(stem, *mlp(4, 5, 3)).double()
    assert "parametrised" in refuse(model, draw(3, 4), UnreadableModelError)
    scores = cn.score(model, draw(3, 4), **settle(start="1", **QUICK))
    assert cn.prune(model, cn.plan(scores, units=0.5), draw(3, 4))[1].out_features == 2


def test_modules_at_the_ends_may_work_in_place():
    model = build(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(True), *mlp(4, 5, 4), nn.ReLU(True), nn.Linear(4, 3))
    )
    inputs = draw(4, 4)
    scores = cn.score(model, inputs, **settle(start="1", stop="4", **QUICK))
    assert scores.logit_error <= SAME_LOGITS
    assert list(scores) == ["2"]


def test_the_model_stays_as_it_is():
    model = copy.deepcopy(HYBRID).float().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scores = cn.score(model, IMAGES, LABELS, **settle(**BODY, **FAST))
    cn.prune(model, cn.plan(scores, units=0.5), IMAGES)
    assert model.training
    assert model.stem.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_spans_work_under_no_grad_and_inference_mode():
    expected = cn.score(HYBRID, IMAGES, LABELS, **settle(**BODY, **FAST))
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            found = cn.score(HYBRID, IMAGES, LABELS, **settle(**BODY, **FAST))
        assert all(np.array_equal(found[name], expected[name]) for name in expected)
