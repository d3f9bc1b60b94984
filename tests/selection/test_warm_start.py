"""Proposing: plans and scores from elsewhere as first masks of the exact program."""

from __future__ import annotations

import re
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from torch import nn

import critical_neurons as cn
from critical_neurons.core.costs import count_cost
from critical_neurons.core.plan import Plan
from critical_neurons.errors import InvalidInputError, InvalidSettingError, PlanMismatchError
from critical_neurons.selection.warm_start import SHARE_STEP, propose_mask
from tests.drawing import draw_scores, make_scores
from tests.settings import settle
from tests.zoo import share_case

SAME = 1e-6
EXACT = {"formulation": "exact", "binary": True, "threads": 1}
HALF = cn.Budget(units=0.5)


def make_case(seed=0, widths=(6, 4)):
    torch.manual_seed(seed)
    first, second = widths
    model = nn.Sequential(
        nn.Linear(5, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 3)
    ).double()
    with torch.no_grad():
        for layer in model[::2]:
            layer.weight.normal_(0.0, 3.0 / layer.in_features**0.5)
    inputs = torch.randn(16, 5, dtype=torch.float64)
    return model, inputs, model(inputs).argmax(dim=1)


MODEL, INPUTS, LABELS = make_case()
NETWORK = cn.read_network(MODEL, INPUTS)
UNITS = NETWORK.unit_count


def make_plan(mask):
    """The plan that keeps exactly these units, which may be none of a layer."""
    return Plan(NETWORK.structure, np.append(mask > 0, True), {}, "by hand", {})


def lose(mask):
    """The mean loss of the masked network, layer by layer."""
    kept = torch.from_numpy(mask)
    with torch.no_grad():
        first = MODEL[0](INPUTS).relu() * kept[:6]
        second = MODEL[2](first).relu() * kept[6:]
        return nn.functional.cross_entropy(MODEL[4](second), LABELS).item()


@cache
def rank_masks():
    """Every mask that keeps half of each layer, or less, and its loss; the best first."""
    masks = np.array(list(product([0.0, 1.0], repeat=UNITS)))
    allowed = masks[(masks[:, :6].sum(axis=1) <= 3) & (masks[:, 6:].sum(axis=1) <= 2)]
    losses = np.array([lose(mask) for mask in allowed])
    order = np.argsort(losses)
    return allowed[order], losses[order]


def best_mask():
    return rank_masks()[0][0]


def worst_mask():
    return rank_masks()[0][-1]


def score(incumbent, *, budget=HALF, **settings):
    return cn.score(MODEL, INPUTS, LABELS, **settle(budget=budget, incumbent=incumbent, **EXACT, **settings))


@cache
def score_best():
    return score(make_plan(best_mask()))


@cache
def score_worst():
    return score(make_plan(worst_mask()))


NO_TIME = {"time_limit": 1e-9}


class TestCertificates:
    def test_the_best_plan_is_returned_and_proved_to_be(self):
        scores = score_best()
        assert scores.status is cn.Status.OPTIMAL
        assert np.array_equal(scores.per_unit, best_mask())
        assert scores.objective == scores.incumbent.objective == pytest.approx(lose(best_mask()), abs=SAME)
        assert scores.incumbent.gap <= scores.settings["solver"].gap
        assert "nothing better was found" in scores.notes[-1]

    def test_a_bad_plan_is_improved_and_told_how_bad_it_is(self):
        scores = score_worst()
        assert scores.status is cn.Status.OPTIMAL
        assert scores.objective == pytest.approx(lose(best_mask()), abs=SAME)
        assert scores.incumbent.objective == pytest.approx(lose(worst_mask()), abs=SAME)
        assert scores.incumbent.bound <= lose(best_mask()) + SAME
        assert scores.incumbent.gap > scores.gap
        gained = scores.incumbent.objective - scores.objective
        assert f"the plan given (by hand) has objective {scores.incumbent.objective:.6g}" in scores.notes[-1]
        assert f"the scores found are better by {gained:.4g}" in scores.notes[-1]

    def test_without_time_it_is_returned_itself_with_a_bound_that_holds(self):
        masks, losses = rank_masks()
        for mask, loss in zip(masks[::150], losses[::150], strict=True):
            scores = score(make_plan(mask), **NO_TIME)
            assert scores.status is cn.Status.FEASIBLE
            assert np.array_equal(scores.per_unit, mask)
            assert scores.objective == pytest.approx(loss, abs=SAME)
            assert scores.bound <= losses[0]
            assert scores.gap == scores.incumbent.gap

    def test_without_a_budget_the_unpruned_network_is_a_rival(self):
        scores = score(make_plan(worst_mask()), budget=None, loss_weight=100.0, **NO_TIME)
        assert (scores.per_unit == 1).all()
        assert scores.objective < scores.incumbent.objective
        assert scores.bound <= scores.objective

    def test_a_search_is_judged(self):
        found = cn.search(MODEL, INPUTS, units=0.5, effort="quick")
        by_scores, by_plan = score(found, **NO_TIME), score(cn.plan(found), **NO_TIME)
        kept = cn.plan(found).stays[:-1].astype(float)
        assert by_scores.incumbent == by_plan.incumbent
        assert by_scores.incumbent.objective == pytest.approx(lose(kept), abs=SAME)
        assert by_scores.objective <= by_scores.incumbent.objective

    def test_it_is_saved_with_the_scores(self, tmp_path):
        scores = score_worst()
        scores.save(tmp_path / "scores.json")
        assert cn.Scores.load(tmp_path / "scores.json").incumbent == scores.incumbent
        assert cn.score(MODEL, INPUTS, LABELS, formulation="linearised").to_dict()["incumbent"] is None

    def test_other_solvers_take_it_too(self):
        pytest.importorskip("pyscipopt")
        scores = score(make_plan(best_mask()), solver="scip")
        assert np.array_equal(scores.per_unit, best_mask())

    def test_other_weights_are_reported(self):
        other = make_case(seed=1)
        plan = cn.plan(cn.score(*other, solver=cn.Solver(threads=1)), units=0.5)
        assert "incumbent: made with other weights of this network" in score(plan).notes
        assert not any("other weights" in note for note in score_best().notes)


class TestMasks:
    def test_scores_of_0_or_1_are_one_themselves(self):
        """What the program found before goes in again, though `plan` would fill the budget up."""
        nothing_of_a_layer = np.array([0.0, 1, 0, 0, 0, 1, 0, 0, 0, 0])
        scores = make_scores(NETWORK.structure, nothing_of_a_layer)
        assert np.array_equal(propose_mask(scores, NETWORK, HALF).mask, nothing_of_a_layer)

    def test_layers_may_be_ignored_where_nothing_is_removed_of_them(self):
        smaller = cn.read_network(MODEL, INPUTS, ignore=("0",))
        kept = np.append(np.ones(6), [0.0, 1, 1, 0])
        for incumbent in (make_plan(kept), make_scores(NETWORK.structure, kept)):
            assert np.array_equal(propose_mask(incumbent, smaller, None).mask, kept[6:])
            assert np.array_equal(propose_mask(incumbent, NETWORK, None).mask, kept)
        gone = kept.copy()
        gone[2] = 0.0
        for incumbent in (make_plan(gone), make_scores(NETWORK.structure, gone)):
            with pytest.raises(PlanMismatchError, match=r"incumbent: 0: .*(removes|removed)"):
                propose_mask(incumbent, smaller, None)

    def test_a_plan_of_the_whole_for_a_span(self):
        span = cn.read_network(MODEL, INPUTS, start="2")
        kept = np.append(np.ones(6), [0.0, 1, 1, 0])
        assert np.array_equal(propose_mask(make_plan(kept), span, None).mask, kept[6:])

    def test_a_plan_of_a_span_for_the_whole(self):
        span = cn.read_network(MODEL, INPUTS, start="2")
        plan = cn.plan(make_scores(span.structure, np.array([0.9, 0.1, 0.8, 0.2])), units=0.5)
        assert np.array_equal(propose_mask(plan, NETWORK, None).mask, [*np.ones(6), 1, 0, 1, 0])

    def test_blocks_of_scores_need_not_be_alike(self):
        """A program knows no blocks; only a plan must remove as much of each."""
        network = share_case("groups").network
        mask = np.ones(network.unit_count)
        mask[0] = 0.0
        assert np.array_equal(propose_mask(make_scores(network.structure, mask), network, None).mask, mask)


class TestRefusals:
    def test_another_network(self):
        model, inputs, labels = make_case(widths=(5, 4))
        with pytest.raises(PlanMismatchError, match="incumbent: made for another network"):
            cn.score(model, inputs, labels, **settle(incumbent=make_plan(best_mask()), **EXACT))

    def test_scores_between_0_and_1(self):
        with pytest.raises(InvalidSettingError, match=r"incumbent: .*binary=True"):
            cn.Exact(incumbent=make_plan(best_mask()))

    def test_a_program_for_every_class(self):
        with pytest.raises(InvalidSettingError, match="incumbent: goes with a single program"):
            score(make_plan(best_mask()), by_class=True)

    @pytest.mark.parametrize(
        "found", ["plan.json", np.ones(10), {"0": [1.0]}], ids=lambda found: type(found).__name__
    )
    def test_what_is_neither_plan_nor_scores(self, found):
        with pytest.raises(InvalidInputError, match=f"incumbent: found {type(found).__name__}. Accepted: a Plan"):
            score(found)

    def test_scores_that_say_nothing_of_what_stays(self):
        scores = make_scores(NETWORK.structure, np.linspace(0.0, 1.0, UNITS))
        with pytest.raises(InvalidSettingError, match="do not say which units stay"):
            score(scores)
        assert score(cn.plan(scores, units=0.5)).incumbent is not None

    def test_over_the_budget_of_a_layer(self):
        over = make_plan(np.array([1.0, 1, 1, 1, 1, 0, 1, 1, 0, 0]))
        with pytest.raises(InvalidSettingError) as caught:
            score(over)
        message = str(caught.value)
        assert "over the budget, units=0.5: 0 keeps 5 units, 3 are allowed." in message
        assert "2 keeps" not in message
        assert score(over, budget=cn.Budget(units=read_share(message))).incumbent.rule == "by hand"

    def test_over_the_budget_of_all(self):
        over = make_plan(np.array([1.0, 1, 1, 1, 1, 0, 1, 1, 0, 0]))
        with pytest.raises(InvalidSettingError, match=r"7 units are kept, 5 are allowed\. It is within units=0\.7:"):
            score(over, budget=cn.Budget(units=0.5, scope="global"))

    @pytest.mark.parametrize("measure", ["params", "macs"])
    @pytest.mark.parametrize("name", ["mlp", "resnet", "mobilenet", "groups"])
    def test_over_a_budget_that_is_counted_linearly(self, name, measure):
        """The share that is told is enough, and the least of its kind."""
        network = share_case(name).network
        plan = cn.plan(draw_scores(name), units=0.8)
        over = rf"{measure} are \d+\.\d\d% over what is allowed"
        with pytest.raises(InvalidSettingError, match=over) as caught:
            propose_mask(plan, network, cn.Budget(**{measure: find_least(network, measure)}))
        assert "counted linearly" in str(caught.value)
        share = read_share(str(caught.value))
        propose_mask(plan, network, cn.Budget(**{measure: share}))
        with pytest.raises(InvalidSettingError):
            propose_mask(plan, network, cn.Budget(**{measure: share - SHARE_STEP}))


def read_share(message):
    return float(re.search(r"It is within \w+=([\d.]+):", message)[1])


def find_least(network, measure):
    """A share hardly above that of what is not scored."""
    nothing, everything = np.append(np.zeros(network.unit_count), 1.0), np.ones(network.unit_count + 1)
    costs = [count_cost(network.structure, kept, measure) for kept in (nothing, everything)]
    return costs[0] / costs[1] + 10 * SHARE_STEP
