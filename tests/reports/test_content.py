"""What a report says is what comparison, plan and scores say."""

import json
from dataclasses import replace

import numpy as np
import pytest

from critical_neurons.core.structure import Layer, Wiring
from critical_neurons.errors import InvalidSettingError, PlanMismatchError
from critical_neurons.reports import assemble, content_assembly, diagram, render_page
from critical_neurons.reports.content import Gain, Rail, Strip
from critical_neurons.reports.drawing import SHADES, draw_cost, draw_rails, draw_units, place_stages
from critical_neurons.reports.wording import show_change, show_quantity
from tests.drawing import draw_plan, draw_scores, make_output, make_structure
from tests.reports.made_up import EVIL, make_residual, make_results
from tests.zoo import CORE


def test_all_of_it_as_json():
    comparison, plan, scores = make_results()
    content = assemble(comparison=comparison, plan=plan, scores=scores, class_names=["a", "b"], call="again")
    data = json.loads(json.dumps(content.to_dict(), allow_nan=False))
    assert [gain["name"] for gain in data["gains"]] == [
        *("Accuracy, test data", "Multiply-adds", "Parameters", "Size on disk"),
        *("Time for one input, torch", "Peak activations"),
    ]
    assert data["gains"][1] == {
        "name": "Multiply-adds",
        "kind": "count",
        "before": 371456,
        "after": 185728,
        "note": "",
    }
    assert data["course"]["history"][0]["bound"] is None  # not known yet: minus infinity
    assert data["facts"]["Settings"] == {"method": "drawn", "labels": "40 values", "compensate": "none"}
    assert data["call"] == "again"
    answered = data["answered"]
    assert len(answered["changes"]) == round((1 - comparison.agreement) * comparison.inputs)
    assert sum(each["after"] for each in answered["classes"]) == round(comparison.after.accuracy * comparison.inputs)
    assert answered["fates"] == {"lost": 6, "won": 1}


@pytest.mark.parametrize("name", CORE)
def test_widths_and_strips_are_those_of_plan_and_scores(name):
    scores = draw_scores(name)
    plan = draw_plan(scores.structure)
    content = assemble(plan=plan, scores=scores)
    assert {each.name: each.after for each in content.layers} == {name: len(kept) for name, kept in plan.kept.items()}
    assert sum(each.kept for each in content.strips) == plan.stays[:-1].sum()
    listed = [score for each in content.strips for score in each.scores]
    np.testing.assert_allclose(listed, scores.per_unit, atol=1e-4)
    assert [stays for each in content.strips for stays in each.stays] == plan.stays[:-1].tolist()
    units = next(gain for gain in content.gains if gain.name == "Units")
    assert (units.before, units.after) == (plan.structure.unit_count, plan.stays[:-1].sum())


def test_scores_of_another_numbering_are_reported_by_layers():
    """A plan that keeps a layer whole has a structure without its units."""
    scores = draw_scores(CORE[0])
    first = scores.structure.removable[0].name
    structure, _ = scores.structure.restrict({first: "asked for"})
    content = assemble(plan=draw_plan(structure), scores=scores)
    assert first not in [name for strip in content.strips for name in strip.layers]
    for strip in content.strips:
        np.testing.assert_allclose(sorted(strip.scores), sorted(set(scores[strip.layers[0]])), atol=1e-4)


def test_the_course_of_a_search():
    _, plan, scores = make_results(width=8)
    course = assemble(plan=plan, scores=scores).course
    assert course.search.stages == scores.search_history.stages
    assert [each.cost.removed for each in course.choices] == [3, 3, 3]
    curve = draw_cost(course.choices[0].cost)
    assert curve.path == "M0 20L33.33 19L66.67 18L100 0"
    assert (curve.x, curve.y) == (37.5, 18.88)  # an eighth of the way from the second point to the third
    assert [place[1:] for place in place_stages(course.search.stages)] == [(0, 25), (25, 75)]


def test_what_is_printed_on_one_sheet_has_its_rails():
    _, plan, scores = make_results(blocks=20)
    track = draw_rails(assemble(plan=plan, scores=scores))
    assert [len(stretch.layers) for stretch in track.stretches] == [24, 18]
    assert [stretch.top for stretch in track.stretches] == [0, 24 * track.row]
    assert all(len(stretch.lines) == 1 for stretch in track.stretches)  # the stream passes both


def test_additions_are_rails():
    rails = diagram.find_rails(make_residual(2))
    assert rails == (Rail(f"{EVIL}, 0.outer, 1.outer", 0, (0, 2, 4), (1, 3, 5)),)


def test_rails_that_overlap_lie_on_different_lanes():
    """Dense connections: every layer reads all that came before."""
    layers = [Layer(str(place), "Linear", np.array([place])) for place in range(4)]
    wirings = [Wiring(str(place), np.arange(place), np.array([place]), np.zeros(place)) for place in range(1, 4)]
    wirings.append(Wiring("out", np.arange(4), make_output().units, np.zeros(4)))
    rails = diagram.find_rails(make_structure([*layers, make_output()], [1] * 4, wirings))
    assert [rail.writers for rail in rails] == [(0,), (1,), (2,)]  # the last is read by the next layer alone
    for one in rails:
        for two in rails:
            ends = [(min(each.writers), max(each.readers)) for each in (one, two)]
            if one is not two and ends[0][0] <= ends[1][1] and ends[1][0] <= ends[0][1]:
                assert one.lane != two.lane


def test_skips_that_are_kept_are_rails_of_their_own():
    whole, _ = make_residual(2).restrict({EVIL: "asked for"})
    (rail,) = diagram.find_rails(whole)
    assert (rail.writers, rail.readers, rail.kept) == ((0, 2, 4), (1, 3, 5), True)
    page = render_page(assemble(plan=draw_plan(whole)))
    assert 'class="rail fixed"' in page
    assert "on a dashed line all stay" in page
    assert "on a dashed line" not in render_page(assemble(plan=draw_plan(make_residual(2))))


def test_a_chain_has_no_rails():
    layers = [Layer("a", "Linear", np.array([0])), make_output()]
    wirings = [Wiring("out", np.array([0]), layers[1].units, np.zeros(1))]
    assert diagram.find_rails(make_structure(layers, [1], wirings)) == ()


@pytest.mark.parametrize("by_score", [False, True])
def test_every_unit_is_drawn_once(by_score):
    generator = np.random.default_rng(0)
    scores, stays = generator.random(50), generator.random(50) < 0.5
    strip = Strip(("a",), 50, int(stays.sum()), tuple(scores.tolist()), tuple(stays.tolist()))
    drawn = {}
    for look, path in draw_units(strip, by_score=by_score).items():
        fate, shade = look.split()
        for part in path.split("z")[:-1]:
            first, width = int(part[1:].split()[0]), int(part.split("h")[1].split("v")[0])
            drawn |= {place: (fate == "stays", int(shade[1:])) for place in range(first, first + width)}
    order = np.argsort(-scores, kind="stable") if by_score else np.arange(50)
    assert drawn == {at: (bool(stays[place]), int(SHADES * scores[place])) for at, place in enumerate(order)}


def test_very_large_networks_are_thinned(monkeypatch):
    monkeypatch.setattr(diagram, "MOST_UNITS", 10)
    _, plan, scores = make_results(blocks=2, width=8)
    content = assemble(plan=plan, scores=scores)
    assert [len(strip.scores) for strip in content.strips] == [3, 3, 3]  # 24 units, every third
    assert content.strips[0].units == 8


def test_very_many_classes_and_changes_are_cut_short(monkeypatch):
    comparison, *_ = make_results()
    monkeypatch.setattr(content_assembly, "MOST_CLASSES", 2)
    monkeypatch.setattr(content_assembly, "MOST_CHANGES", 3)
    answered = assemble(comparison=comparison).answered
    assert [each.label for each in answered.classes] == [0, 2]  # class 1 gains what it loses, nearly
    assert (answered.class_count, len(answered.changes), answered.changed) == (3, 3, 7)
    assert "the 2 that changed most" in render_page(assemble(comparison=comparison))


def test_what_there_is_not_is_left_out():
    comparison, plan, scores = make_results()
    alone = assemble(comparison=comparison)
    assert (alone.layers, alone.strips, alone.course) == ((), (), None)
    assert assemble(plan=plan).strips[0].scores is None
    assert assemble(scores=scores).strips[0].stays is None
    nothing = replace(comparison.before, accuracy=None, latencies=())
    gains = assemble(comparison=replace(comparison, before=nothing, after=nothing)).gains
    assert gains[0] == Gain(
        "Same predictions", "share", None, comparison.agreement, "of the inputs get the same class"
    )
    assert not any(gain.kind == "seconds" for gain in gains)


def test_bad_input():
    with pytest.raises(InvalidSettingError, match="nothing to report"):
        assemble()
    _, plan, _ = make_results()
    other = draw_scores(CORE[0])
    with pytest.raises(PlanMismatchError, match="different networks"):
        assemble(plan=plan, scores=other)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (0.975, "share", "97.50%"),
        (999, "count", "999"),
        (999.6, "count", "1.00 k"),
        (371_456, "count", "371 k"),
        (71_754, "count", "71.8 k"),
        (1_315, "bytes", "1.31 kB"),
        (4e12, "count", "4.00 T"),
        (0.00036, "seconds", "0.36 ms"),
        (1.5, "seconds", "1.50 s"),
        (29e-6, "seconds", "29.0 \N{MICRO SIGN}s"),
    ],
)
def test_quantities(value, kind, text):
    assert show_quantity(value, kind) == text


def test_changes():
    assert show_change(Gain("", "share", 0.9, 0.85)) == "\N{MINUS SIGN}5.00 points"
    assert show_change(Gain("", "count", 200, 50)) == "25.0% left"
    assert show_change(Gain("", "seconds", 3.0, 2.0)) == "1.50\N{MULTIPLICATION SIGN} as fast"
    assert show_change(Gain("", "bytes", 3, 3)) == "unchanged"
    assert show_change(Gain("", "share", None, 0.2, "of all")) == "of all"
    longer = Gain("", "seconds", 2.0, 3.0)
    assert (show_change(longer), longer.worse) == ("1.50\N{MULTIPLICATION SIGN} as long", True)
    noise = Gain("", "seconds", 3.0, 3.1)
    assert (show_change(noise), noise.worse) == ("about the same", False)
    assert show_change(Gain("", "bytes", 2, 3)) == "1.50\N{MULTIPLICATION SIGN} as much"
