"""Pictures and what notebooks show: of every kind of result, and whatever its names."""

import sys
from xml.etree import ElementTree

import matplotlib as mpl
import pytest

from critical_neurons.core.solution import Step
from critical_neurons.errors import MissingExtraError
from critical_neurons.reports import assemble, render_page
from critical_neurons.reports.content import Trials
from critical_neurons.reports.figures import draw_drafts, draw_history, draw_trials
from tests.drawing import draw_plan, draw_scores
from tests.reports.made_up import EVIL, make_results
from tests.zoo import CORE

mpl.use("agg")


@pytest.fixture(autouse=True)
def closed():
    yield
    from matplotlib import pyplot

    pyplot.close("all")


@pytest.mark.parametrize("which", [0, 1, 2], ids=["comparison", "plan", "scores"])
def test_plots(which):
    result = make_results()[which]
    axes = result.plot()
    axes.figure.canvas.draw()
    assert result.plot(axes) is axes  # another's axes are drawn on


def test_what_a_backend_sets_when_it_is_loaded_stays(monkeypatch):
    """That of notebooks becomes interactive with the first figure; otherwise later pictures would not be shown."""
    from matplotlib import pyplot

    original = pyplot.figure

    def load_and_make(**kwargs):
        mpl.interactive(True)
        return original(**kwargs)

    monkeypatch.setattr(pyplot, "figure", load_and_make)
    with mpl.rc_context():
        make_results()[1].plot()
        assert mpl.is_interactive()


def test_a_dark_style_gets_light_ink():
    from matplotlib import colors, pyplot

    with pyplot.style.context("dark_background"):
        drawn = make_results()[1].plot()
    (text, *_) = drawn.get_legend().get_texts()
    assert sum(colors.to_rgb(text.get_color())) > 2
    beside = pyplot.figure(facecolor="white").add_subplot(facecolor="none")
    assert sum(colors.to_rgb(make_results()[1].plot(beside).get_legend().get_texts()[0].get_color())) < 1


def test_a_plan_is_drawn_to_scale():
    _, plan, _ = make_results()
    axes = plan.plot()
    before, after = ([bar.get_width() for bar in bars] for bars in axes.containers)
    assert before == [layer.size for layer in plan.structure.layers]
    assert after == [len(kept) for kept in plan.kept.values()]
    assert axes.get_yticklabels()[0].get_text() == EVIL


@pytest.mark.parametrize("name", CORE[:3])
def test_notebooks_of_the_zoo(name):
    scores = draw_scores(name)
    for result in (scores, draw_plan(scores.structure)):
        html = result._repr_html_()
        assert "<script" not in html
        assert all(layer.name in html for layer in scores.structure.removable[:1])


def test_notebooks_escape():
    for result in make_results():
        assert EVIL not in result._repr_html_()


def test_charts_are_the_same_every_time_and_take_the_page_colours():
    steps = [Step(0.0, None, 0.0, 0, 0), Step(1.0, 2.0, 1.0, 0, 0), Step(2.0, 1.5, 1.5, 0, 0)]
    for draw, what in (
        (draw_history, steps),
        (draw_drafts, make_results()[2].search_history),
        (draw_trials, Trials(0.9, 0.1, ((0.2, 0.7), (0.5, 0.85)))),
    ):
        svg = draw(what)
        assert svg == draw(what)
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert "var(--kept)" in svg
        assert "var(--removed)" in svg


def test_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as if not installed
    comparison, plan, scores = make_results()
    for each in (comparison, plan, scores):
        with pytest.raises(MissingExtraError, match=r"pip install 'critical_neurons\[plot\]'"):
            each.plot()
    page = render_page(assemble(comparison=comparison, plan=plan, scores=scores))
    assert "pip install &#39;critical_neurons[plot]&#39;" in page
