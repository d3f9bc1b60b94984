"""The page in a real browser: whole, quiet, asking for nothing, within its width; text stays text."""

import json
from base64 import b64decode

import numpy as np
import pytest

from critical_neurons.reports import assemble, render_page
from critical_neurons.reports.pictures import draw_pictures
from tests.browser import FOUND, Browser
from tests.reports.made_up import EVIL, make_results

MOST_BYTES = 5 * 10**6

pytestmark = pytest.mark.skipif(FOUND is None, reason="no Chromium on this machine")


@pytest.fixture(scope="module")
def browser():
    opened = Browser()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    comparison, plan, scores = make_results()
    content = assemble(
        comparison=comparison, plan=plan, scores=scores, title=EVIL, class_names=[EVIL, "b"], call=f"run {EVIL}"
    )
    rows = [each.row for each in content.answered.changes]
    pictures = dict(zip(rows, draw_pictures(np.random.default_rng(0).random((len(rows), 3, 8, 8))), strict=True))
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(render_page(content, pictures), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def large_page(tmp_path_factory):
    """121 layers, more than 5 000 units."""
    comparison, plan, scores = make_results(blocks=60, width=90)
    path = tmp_path_factory.mktemp("report") / "large.html"
    path.write_text(render_page(assemble(comparison=comparison, plan=plan, scores=scores)), encoding="utf-8")
    return path


def count(browser, selector):
    return browser.run(f"document.querySelectorAll({json.dumps(selector)}).length")


def pick(browser, name, value):
    """One of the choices that a control offers."""
    browser.run(
        f"(() => {{ const each = document.getElementById('{name}'); each.value = '{value}';"
        " each.dispatchEvent(new Event('change')); })()"
    )


def point(browser, selector, share):
    """At a share of the width of something."""
    left, top, width, height = browser.run(
        f"(() => {{ const box = document.querySelector('{selector}').getBoundingClientRect();"
        " return [box.left, box.top, box.width, box.height]; })()"
    )
    browser.point(left + share * width, top + height / 2)


def test_every_part_is_there(browser, page):
    browser.open(page, width=1600)
    assert browser.complaints == []
    assert browser.requests == [page.as_uri()]
    parts = browser.run("[...document.querySelectorAll('section')].map((each) => each.id)")
    assert parts == ["gained", "network", "units", "search", "classes", "origin"]
    assert count(browser, ".gain") == 6
    assert count(browser, "li.layer") == 6
    assert count(browser, ".rail .writes") == 3
    assert count(browser, ".strip") == 3
    assert count(browser, ".chart svg") == 1
    assert count(browser, ".stages li") == 2
    assert count(browser, "td.cost .chosen") == 3
    assert count(browser, ".classes tbody tr") == 3
    assert count(browser, ".changes img") == count(browser, ".changes li") == 7
    assert browser.run("[...document.images].every((each) => each.complete && each.naturalWidth === 8)")
    widths = browser.run(
        "[...document.querySelectorAll('.widths i')].map((each) => each.getBoundingClientRect().width)"
    )
    assert max(widths) > 100


def test_text_stays_text(browser, page):
    browser.open(page, width=1600)
    assert browser.run("window.evil") is None
    assert count(browser, "script") == 1
    assert browser.run("document.querySelector('h1').textContent") == EVIL
    assert browser.run("document.querySelector('.layer .name bdi').firstChild.textContent") == EVIL
    assert "drawn <b>at random</b>" in browser.run("document.querySelector('.rule').textContent")


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1600])
def test_nothing_overflows(browser, page, large_page, width, dark):
    for path in (page, large_page):
        browser.open(path, width=width, dark=dark)
        browser.run("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.complaints == []
    red, green, blue = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red + green + blue < 150) == dark


def test_sorting(browser, page):
    browser.open(page, width=1000)
    shown = "[...document.querySelectorAll('.strip')].map((each) => +each.dataset."
    assert browser.run(f"{shown}strip)") == [0, 1, 2]
    pick(browser, "layers-sorted", "mean")
    means = browser.run(f"{shown}mean)")
    assert means == sorted(means)
    pick(browser, "layers-sorted", "removed")
    removed = browser.run(f"{shown}removed)")
    assert removed == sorted(removed, reverse=True)
    pick(browser, "layers-sorted", "")
    assert browser.run(f"{shown}strip)") == [0, 1, 2]
    visible = (
        "[...document.querySelectorAll('.strip svg')].filter((each) => each.getBoundingClientRect().height)"
        ".map((each) => each.classList[0])"
    )
    assert set(browser.run(visible)) == {"by-number"}
    pick(browser, "units-sorted", "by-score")
    assert set(browser.run(visible)) == {"by-score"}
    pick(browser, "changes-shown", "won")
    assert browser.run("[...document.querySelectorAll('.changes li')].filter((each) => !each.hidden).length") == 1


def test_pointing(browser, page):
    """At a layer that is kept for its reason, at a unit for its score."""
    browser.open(page, width=1000, height=1600)
    point(browser, ".layer.whole", 0.5)
    assert "it gives the network" in browser.run("document.querySelector('.layer.whole:hover .hint').innerText")
    point(browser, ".strip svg.by-number", 0.99)
    _, plan, scores = make_results()
    fate = "stays" if plan.stays[7] else "removed"
    assert browser.run("document.getElementById('unit').textContent") == (
        f"{EVIL}, unit 7, score {round(scores.per_unit[7], 4):.3f}, {fate}"
    )


def test_the_data_can_be_downloaded(browser, page):
    browser.open(page, width=1000)
    link = browser.run("document.getElementById('data').href")
    comparison, plan, scores = make_results()
    reported = assemble(comparison=comparison, plan=plan, scores=scores).to_dict()
    found = json.loads(b64decode(link.partition(",")[2]))
    assert found["strips"] == json.loads(json.dumps(reported))["strips"]


def test_large_networks_make_small_pages(browser, large_page):
    assert large_page.stat().st_size < MOST_BYTES / 5
    browser.open(large_page, width=1600)
    assert count(browser, "li.layer") == 122
    assert browser.run("document.querySelector('.rails').getBoundingClientRect().width") < 100


def test_prints(browser, page):
    browser.open(page, width=1000, dark=True)
    assert len(b64decode(browser.call("Page.printToPDF")["data"])) > 10_000
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.run("getComputedStyle(document.querySelector('.controls')).display") == "none"
    assert browser.run("getComputedStyle(document.querySelector('.cn')).color") == "rgb(28, 35, 43)"
    assert browser.run("document.querySelector('.paper').innerText").startswith("Kept: out. ")
