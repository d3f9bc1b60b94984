"""The public search: what a user may get wrong, what the scores say, and that the search finds what matters."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.cli.tables import describe_solve
from critical_neurons.core.costs import count_cost
from critical_neurons.core.search_history import MOST_KEPT
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.removal.metrics import measure_accuracy
from critical_neurons.selection import budget_search, layerwise_search
from critical_neurons.selection.effort import EFFORTS
from tests.zoo import first_or_slow

INPUTS = 80
BETTER = 0.05
"""Of accuracy."""

SAME_OBJECTIVE = 1e-4
ROUNDING = 1e-9


@pytest.fixture(scope="module")
def trained():
    """A network for two spirals, and points of them it was not trained on."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 40), nn.ReLU(), nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 2))
    inputs, labels = draw_spirals(300, seed=0)
    optimiser = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(150):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimiser.step()
    return model.eval(), *draw_spirals(600, seed=1)


def draw_spirals(count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    turn = 4 * torch.rand(count, generator=generator) + 1
    angle = turn + torch.pi * labels
    points = turn[:, None] * torch.stack([angle.cos(), angle.sin()], 1) / 2
    return points + 0.05 * torch.randn(count, 2, generator=generator), labels


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 3)).eval()


def draw(count=INPUTS):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(1))


quick = partial(cn.search, effort="quick")


def test_the_search_itself_keeps_multiples():
    """A plan that rounds in the same way keeps what was searched for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 21), nn.ReLU(), nn.Linear(21, 16), nn.ReLU(), nn.Linear(16, 3)).eval()
    scores = quick(model, draw(), macs=0.5, round_to=4)
    plan = cn.plan(scores, round_to=4)
    assert np.array_equal(plan.stays[:-1], scores.per_unit >= 0.5)
    assert [len(units) % 4 for units in plan.kept.values()][:2] == [0, 0]
    found = cn.compress(model, draw(), macs=0.5, round_to=4, effort="quick", onnx=False)
    assert np.array_equal(found.plan.stays, plan.stays)
    with pytest.raises(cn.errors.InvalidSettingError, match=r"round_to=0\. Accepted: a whole number of at least 1"):
        quick(model, draw(), macs=0.5, round_to=0)


@pytest.mark.parametrize("compensate", ["none", "least_squares"])
def test_searched_units_are_better_than_random_ones(trained, compensate):
    model, inputs, labels = trained
    plan = cn.plan(cn.search(model, inputs[:300], units=0.2, compensate=compensate))

    def measure(plan):
        return measure_accuracy(
            cn.prune(model, plan, inputs[:300], compensate=compensate), inputs[300:], labels[300:]
        )

    assert measure_accuracy(model, inputs, labels) > 0.95
    assert measure(plan) > np.mean([measure(plan.random(seed)) for seed in range(5)]) + BETTER


def test_units_that_others_can_stand_in_for_go_without_loss():
    """Every second unit is a copy of the one before it: their consumer can do with half of them."""
    model = build()
    with torch.no_grad():
        for layer in (model[0], model[2]):
            layer.weight[1::2], layer.bias[1::2] = layer.weight[::2], layer.bias[::2]
    inputs = draw()
    scores = cn.search(model, inputs, units=0.5)
    smaller = cn.prune(model, cn.plan(scores), inputs, compensate="least_squares")
    with torch.no_grad():
        assert torch.allclose(smaller(inputs), model(inputs), atol=1e-2)
    kept = cn.plan(scores).kept
    assert (kept["0"] // 2).tolist() == [0, 1, 2, 3, 4]
    assert (kept["2"] // 2).tolist() == [0, 1, 2]


@pytest.mark.usefixtures("short_descent")
@pytest.mark.parametrize("compensate", ["none", "bias", "least_squares"])
def test_scores_say_what_was_done_and_travel(tmp_path, compensate):
    scores = quick(build(), draw(), macs=0.6, compensate=compensate)
    assert scores.status is cn.Status.FEASIBLE
    assert (scores.bound, scores.gap) == (None, None)
    assert scores.objective > 0
    assert budget_search.UNCERTIFIED in scores.notes
    assert scores.settings["method"] == ("elimination" if compensate == "least_squares" else "gates")
    assert len(scores.inputs) == INPUTS
    (line,) = describe_solve(scores)  # there was no program, so neither sizes nor a solver that stopped early
    assert f"distance of the outputs from the original's: {scores.objective:.3g}" in line.plain
    scores.save(tmp_path / "scores.json")
    again = cn.Scores.load(tmp_path / "scores.json")
    assert np.array_equal(cn.plan(again).stays, cn.plan(scores).stays)
    assert np.array_equal(cn.plan(scores, macs=0.6, compensate=compensate).stays[:-1], scores.per_unit >= 0.5)


def test_a_module_whose_output_nothing_reads():
    """As the last residual branch of a WaveNet, of which only the skip connections are summed."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.skip, self.unread = nn.Linear(3, 6), nn.Linear(6, 2), nn.Linear(6, 4)

        def forward(self, x):
            x = torch.tanh(self.first(x))
            self.unread(x)
            return self.skip(x)

    scores = cn.search(Skipping(), torch.randn(20, 3), units=0.5, effort="quick")
    assert scores.structure.unit_count == 6 + 4  # those that nothing reads can go as well


@pytest.mark.parametrize("compensate", ["none", "least_squares"])
def test_a_share_of_all_units_may_differ_from_layer_to_layer(compensate):
    model = build()
    with torch.no_grad():
        model[2].weight[:, :8] = 0.0  # of the first layer two units are read
    plan = cn.plan(cn.search(model, draw(400), units=0.3, scope="global", compensate=compensate))
    assert len(plan.kept["0"]) <= 2
    assert len(plan.kept["0"]) + len(plan.kept["2"]) == 4


class Parallel(nn.Module):
    """Two branches side by side added to a third: units of one group that cost differently much."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.before, self.second = nn.Linear(4, 4), nn.Linear(4, 9), nn.Linear(9, 6)
        self.third, self.last = nn.Linear(4, 10), nn.Linear(10, 3)

    def forward(self, inputs):
        second = self.second(torch.relu(self.before(inputs)))
        return self.last(torch.relu(torch.cat([self.first(inputs), second], 1) + self.third(inputs)))


@pytest.mark.usefixtures("short_descent")
@pytest.mark.parametrize("compensate", ["none", "least_squares"])
@pytest.mark.parametrize("share", first_or_slow(0.5, 0.4, 0.6, 0.7))
def test_what_stays_is_reported_by_scores_where_units_of_a_group_cost_differently_much(share, compensate):
    scores = quick(Parallel().eval(), draw(), macs=share, compensate=compensate)
    assert np.array_equal(scores.per_unit >= 0.5, cn.plan(scores).stays[:-1])


def test_a_plan_counts_the_biases_that_refitting_adds():
    torch.manual_seed(0)
    layers = [nn.Linear(*sizes, bias=False) for sizes in ((16, 8), (8, 50), (50, 10))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).eval()
    inputs = torch.randn(INPUTS, 16, generator=torch.Generator().manual_seed(1))
    smaller = cn.prune(model, cn.plan(quick(model, inputs, params=0.5)), inputs, compensate="least_squares")
    before, after = (sum(each.numel() for each in network.parameters()) for network in (model, smaller))
    assert after <= 0.5 * before


def test_inputs_in_the_order_of_their_classes_are_all_heard():
    """Each half of the units speaks for two classes, of which each half of the inputs has its own."""
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        model[0].weight.zero_(), model[0].bias.zero_()
        model[0].weight[:4, 0], model[0].weight[4:, 1] = torch.ones(4), torch.ones(4)
        model[0].bias[:] = -torch.arange(4.0).repeat(2)
        model[2].weight.zero_(), model[2].bias.zero_()
        model[2].weight[:2, :4], model[2].weight[2:, 4:] = 30 + torch.rand(2, 4), 30 + torch.rand(2, 4)
    inputs = torch.zeros(600, 2)
    inputs[:300, 0], inputs[300:, 1] = 1 + 4 * torch.rand(300), 1 + 4 * torch.rand(300)
    kept = cn.plan(cn.search(model, inputs, units=0.5)).kept["0"]
    assert {unit < 4 for unit in kept.tolist()} == {True, False}


@pytest.mark.usefixtures("short_descent")
def test_the_objective_is_the_divergence_of_the_outputs():
    model, inputs = build(), draw()
    scores = quick(model, inputs, units=0.5, compensate="none")
    with torch.no_grad():
        found, wanted = (each(inputs).log_softmax(1) for each in (cn.mask(model, cn.plan(scores)), model))
    divergence = nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean")
    assert scores.objective == pytest.approx(float(divergence), rel=SAME_OBJECTIVE)


@pytest.mark.parametrize("compensate", ["none", "least_squares"])
@pytest.mark.parametrize("ending", first_or_slow(nn.Softmax(1), nn.LogSoftmax(1)), ids=str)
def test_a_final_softmax_changes_nothing(compensate, ending):
    """Certain as the model is, the softmax gives hardly anything but zeros and ones."""
    model, inputs = build(), draw()
    with torch.no_grad():
        model[4].weight.mul_(30), model[4].bias.mul_(30)
    bare, ended = (
        quick(each, inputs, macs=0.5, compensate=compensate) for each in (model, nn.Sequential(*model, ending))
    )
    assert np.array_equal(ended.per_unit, bare.per_unit)
    assert ended.objective == pytest.approx(bare.objective, rel=SAME_OBJECTIVE)


def test_every_layer_has_an_error_and_a_bound_that_travel(tmp_path):
    scores = quick(build(), draw(), units=0.5)
    assert [choice.layers for choice in scores.layer_choices] == [("0",), ("2",)]
    assert all(0.0 < choice.bound <= choice.error and 0.0 <= choice.gap < 1.0 for choice in scores.layer_choices)
    assert all(str(choice) in scores.notes for choice in scores.layer_choices)
    assert budget_search.UNCERTIFIED in scores.notes
    assert scores.bound is None
    scores.save(tmp_path / "scores.json")
    assert cn.Scores.load(tmp_path / "scores.json").layer_choices == scores.layer_choices


def test_scores_saved_before_there_were_choices_of_layers_can_be_read():
    scores = quick(build(), draw(), units=0.5)
    data = scores.to_dict()
    del data["layer_choices"]
    assert cn.Scores.from_dict(data).layer_choices == ()


def test_spans_and_layers_to_ignore():
    assert set(quick(build(), draw(), units=0.5, ignore="0")) == {"2"}
    scores = quick(build(), draw(), units=0.5, start="2")
    assert set(scores) == {"2"}
    assert cn.plan(scores).span.start == "2"


@pytest.mark.usefixtures("short_descent")
def test_where_no_module_could_be_refitted_gates_are_used():
    """The head is called twice: what it reads is refitted for neither call alone."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, inputs):
            return self.head(torch.relu(self.hidden(inputs))) + self.head(torch.relu(-self.hidden(inputs)))

    scores = quick(Twice(), draw(), units=0.5)
    assert scores.settings["method"] == "gates"
    assert budget_search.UNFITTED in scores.notes


@pytest.mark.usefixtures("short_descent")
def test_one_search_finds_the_same_for_every_budget_as_many(monkeypatch):
    """And an estimate for the same budget keeps to it."""
    for compensate in ("none", "least_squares"):
        reported = []
        settings = budget_search.SearchSettings(effort="quick", compensate=compensate)
        one = budget_search.Search(build(), draw(), settings, progress=reported.append)
        for share in (0.7, 0.4, 0.7):
            found = one.find(cn.Budget(macs=share))
            alone = quick(build(), draw(), macs=share, compensate=compensate)
            assert np.array_equal(found.per_unit, alone.per_unit)
            assert found.objective == alone.objective
            estimated = cn.plan(one.estimate(cn.Budget(macs=share)), macs=share, compensate=compensate)
            kept = estimated.stays.astype(float)
            whole, left = (count_cost(found.structure, each, "macs") for each in (np.ones_like(kept), kept))
            assert left <= share * whole
        once = int(compensate == "least_squares")
        assert (
            reported.count("gathering what layers read: 0 of 2") == reported.count("ordering units: 0 of 2") == once
        )


def measure_loss(model, scores, inputs, compensate):
    smaller = cn.prune(model, cn.plan(scores), inputs, compensate=compensate)
    with torch.no_grad():
        found, wanted = (nn.functional.log_softmax(each(inputs), dim=1) for each in (smaller, model))
    return float(nn.functional.kl_div(found, wanted, log_target=True, reduction="batchmean"))


@pytest.mark.parametrize(
    ("budget", "compensate"),
    [
        ({"macs": 0.3}, "least_squares"),
        pytest.param({"units": 0.5}, "least_squares", marks=pytest.mark.slow),
        *(pytest.param(budget, "none", marks=pytest.mark.slow) for budget in ({"units": 0.5}, {"macs": 0.3})),
    ],
    ids=str,
)
def test_the_objective_of_a_standard_search_is_the_loss_of_the_refitted_network(trained, compensate, budget):
    model, inputs, _ = trained
    scores = cn.search(model, inputs, **budget, compensate=compensate)
    assert scores.objective == pytest.approx(measure_loss(model, scores, inputs, compensate), abs=SAME_OBJECTIVE)


def test_of_all_rounds_the_one_that_misses_least_is_taken(trained, monkeypatch):
    model, inputs, _ = trained
    views = []
    for name in ("carry_out", "judge"):
        own = getattr(layerwise_search.LayerwiseSearch, name)
        monkeypatch.setattr(
            layerwise_search.LayerwiseSearch, name, lambda *given, own=own: views.append(own(*given)) or views[-1]
        )
    scores = cn.search(model, inputs, units=0.3, effort="thorough")
    best = min(views, key=lambda view: view.miss)
    assert len(views) == 1 + EFFORTS["thorough"].rounds
    assert np.array_equal(scores.per_unit >= 0.5, best.stays[:-1])
    assert scores.objective == best.loss


def test_an_interrupt_leaves_the_best_so_far(trained, monkeypatch):
    model, inputs, _ = trained
    monkeypatch.setitem(EFFORTS, "quick", replace(EFFORTS["thorough"], rounds=0))
    first, order = cn.search(model, inputs, units=0.3, effort="quick"), layerwise_search.LayerwiseSearch.order

    def interrupt(layers, view, *given):
        if view is not layers.whole:
            raise KeyboardInterrupt
        return order(layers, view, *given)

    monkeypatch.setattr(layerwise_search.LayerwiseSearch, "order", interrupt)
    assert np.array_equal(cn.search(model, inputs, units=0.3, effort="thorough").per_unit, first.per_unit)


def test_pairs_of_inputs_and_labels_are_taken():
    inputs = draw()
    scores = quick(build(), [(inputs[:40], torch.zeros(40).long()), (inputs[40:], torch.zeros(40).long())], units=0.5)
    assert np.array_equal(scores.per_unit, quick(build(), inputs, units=0.5).per_unit)


@pytest.mark.usefixtures("short_descent")
def test_a_loader_of_inputs_alone_is_taken():
    inputs = draw()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs), batch_size=32)  # gives lists of one
    found, expected = (quick(build(), each, units=0.5, compensate="none") for each in (loader, inputs))
    assert np.array_equal(found.per_unit, expected.per_unit)


@pytest.mark.usefixtures("short_descent")
def test_a_share_may_be_a_number_of_numpy(tmp_path):
    scores = quick(build(), draw(), units=np.float32(0.5), compensate="none")
    assert np.array_equal(scores.per_unit, quick(build(), draw(), units=0.5, compensate="none").per_unit)
    scores.save(tmp_path / "scores.json")


@pytest.mark.usefixtures("short_descent")
@pytest.mark.parametrize("compensate", ["none", "least_squares"])
@pytest.mark.parametrize("budget", [{"macs": 1e-3}, {"params": 1e-3}, {"units": 1e-3, "scope": "global"}], ids=str)
def test_a_budget_out_of_reach_names_one_that_is_met_before_anything_is_run(compensate, budget):
    reported = []
    with pytest.raises(InvalidSettingError) as caught:
        quick(build(), draw(), **budget, compensate=compensate, progress=reported.append)
    assert reported == []
    name, share = re.search(r"Give (\w+)=(\S+) or more\.$", str(caught.value)).groups()
    plan = cn.plan(quick(build(), draw(), **{**budget, name: float(share)}, compensate=compensate))
    assert [len(plan.kept[layer]) for layer in ("0", "2")] == [1, 1]


@pytest.mark.parametrize(("compensate", "scale"), [("none", 1e60), ("least_squares", 1e60), ("least_squares", 1e30)])
def test_inputs_too_large_for_single_precision_are_reported(compensate, scale):
    with pytest.raises(InvalidInputError, match="inputs: the model gives NaN or infinite values for them"):
        cn.search(build(), draw().double() * scale, units=0.5, compensate=compensate)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "budget: found none. Accepted: one of units, params, macs and latency"),
        ({"units": 0.5, "macs": 0.5}, "budget: found units, macs. Accepted: one of units, params, macs and latency"),
        ({"units": True}, r"units: found True. Accepted: a share above 0 and up to 1"),
        ({"units": 1.5}, r"units: found 1.5. Accepted: a share above 0 and up to 1"),
        ({"units": 0.5, "scope": "all"}, "scope: found 'all'. Accepted: 'layer', 'global'"),
        ({"macs": 0.5, "scope": "global"}, "scope: says how units are counted"),
        ({"units": 0.5, "compensate": "yes"}, "compensate: found 'yes'"),
        ({"units": 0.5, "seed": -1}, "seed: found -1"),
        ({"macs": 1e-6}, "cannot be met; with one unit of every layer the cost is"),
        ({"macs": 1e-6, "compensate": "none"}, "cannot be met; with one unit of every layer the cost is"),
    ],
)
def test_wrong_settings_are_reported(settings, message):
    with pytest.raises(InvalidSettingError, match=message):
        quick(build(), draw(), **settings)


def test_too_few_inputs_and_nothing_to_score_are_reported():
    with pytest.raises(InvalidInputError, match=r"found 3 inputs\. Give 8 or more"):
        cn.search(build(), draw(3), units=0.5)
    with pytest.raises(InvalidInputError, match=r"found 8 inputs\. Give 9 or more"):
        cn.search(build(), draw(8), units=0.5, compensate="distil")
    with pytest.raises(InvalidInputError, match="nothing that could be removed"):
        cn.search(nn.Sequential(nn.Linear(4, 3)), draw(), units=0.5)


class Switching(nn.Module):
    """The last layer depends on the size of the batch."""

    def __init__(self):
        super().__init__()
        self.first, self.few, self.many = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, given):
        hidden = torch.relu(self.first(given))
        return self.few(hidden) if len(given) < 20 else self.many(hidden)


def test_a_layer_that_no_batch_reaches_is_reported():
    with pytest.raises(InvalidInputError, match="few: none of the batches of up to 64 inputs reaches this layer"):
        quick(Switching(), torch.randn(128, 4), units=0.5)


@pytest.mark.parametrize(
    ("effort", "compensate"), [("standard", "least_squares"), ("quick", "least_squares"), ("quick", "none")]
)
def test_how_a_search_went(tmp_path, effort, compensate):
    reported = []
    scores = cn.search(build(), draw(), units=0.5, effort=effort, compensate=compensate, progress=reported.append)
    history = scores.search_history
    assert [each.name for each in history.stages] == list(dict.fromkeys(each.stage for each in reported))
    assert sum(each.seconds for each in history.stages) == pytest.approx(scores.seconds, rel=0.2, abs=0.05)
    assert history.drafts[history.taken].loss == scores.objective
    times = [each.seconds for each in history.drafts]
    assert times == sorted(times)
    if compensate == "least_squares":
        assert len(history.drafts) == 1 + EFFORTS[effort].rounds
        plan = cn.plan(scores)
        for cost in history.costs:
            assert cost.removed == len(plan.removed[cost.layers[0]])
            assert (cost.losses[0], len(cost.losses)) == (0, cost.units + 1)
            assert list(cost.losses) == sorted(cost.losses)
    else:
        assert len(history.drafts) == 1 + MOST_KEPT
    scores.save(tmp_path / "scores.json")
    assert cn.Scores.load(tmp_path / "scores.json").search_history == history


def test_distances_that_are_not_finite_are_saved(tmp_path):
    """Before anything is removed the logarithm is minus infinity."""

    def measure(one, other):
        return ((one - other) ** 2).mean().sub(ROUNDING).relu().log()

    scores = quick(build(), draw(), units=0.5, compensate="none", distance=measure)
    assert None in [each.loss for each in scores.search_history.drafts]
    scores.save(tmp_path / "scores.json")
    assert cn.Scores.load(tmp_path / "scores.json").search_history == scores.search_history


def test_a_distance_without_a_name_is_saved_by_its_type(tmp_path):
    scores = quick(build(), draw(), units=0.5, distance=nn.MSELoss())
    scores.save(tmp_path / "scores.json")
    assert cn.Scores.load(tmp_path / "scores.json").settings["distance"] == "MSELoss"
