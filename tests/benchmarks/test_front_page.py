from xml.etree import ElementTree

import pytest

from critical_neurons_reproduction.store import Store
from distillation import read_lines
from distillation_page import summarise
from front_page import (
    CASES,
    COMPENSATE,
    README,
    RESULTS,
    TABLE,
    choose,
    draw,
    find_best_other,
    list_points,
)
from quality_page import CALIBRATION, OURS, VOID, collect


@pytest.fixture(scope="module")
def measured():
    return collect(Store(RESULTS).find_all("quality"))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_picture_is_drawn_and_the_same_every_time(measured, theme):
    picture = draw(measured, theme)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert draw(measured, theme) == picture


def test_the_best_other_is_the_best(measured):
    for case in CASES:
        cells = choose(measured, case)
        best = find_best_other(cells)
        lost = {name: sum(sum(each.lose(name, COMPENSATE)) for each in cells) for name in cells[0].methods}
        assert best != OURS
        assert lost[best] == min(loss for name, loss in lost.items() if name != OURS)


def test_all_methods_have_the_same_multiply_adds(measured):
    for case in CASES:
        cells = choose(measured, case)
        across = [[macs for macs, _ in list_points(cells, name)] for name in cells[0].methods]
        assert all(each == pytest.approx(across[0], abs=0.01) for each in across)


def test_no_void_results_are_shown():
    assert all(data != "cifar10" for data, _ in CASES)


def test_the_table_in_the_readme_is_current():
    shown = TABLE.search(README.read_text())[0]
    assert shown.splitlines() == summarise(read_lines()), "run: python benchmarks/front_page.py"


def test_what_the_readme_says_of_losses(measured):
    usual = [each for each in measured if each.place.images == CALIBRATION and each.place.data not in VOID]
    lost = [sum(each.compare(way).verdict == "loses" for each in usual) for way in ("least_squares", "none")]
    assert lost == [1, 3]
    text = " ".join(README.read_text().split())
    assert "lost least or tied in all cells but one; without refitting in all but three" in text
    assert len({each.place.case for each in usual}) == 7
