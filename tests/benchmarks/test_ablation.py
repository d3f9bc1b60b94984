"""The page of the ablation study: that of the stored results, with differences paired by draw and budget."""

from __future__ import annotations

import pytest

from ablation import VARIANTS
from ablation_page import PAGE, PARTS, Difference, Study, build_page, list_studied


def make_lines(accuracies, variant, budget="macs-0.3", network="mlp"):
    """A line for each draw; None for a draw that was not measured."""
    return [
        {
            "name": f"{network}/draw-{draw}/{budget}/{variant}",
            "accuracy": accuracy,
            "search_seconds": 1.0,
        }
        for draw, accuracy in enumerate(accuracies)
        if accuracy is not None
    ]


def test_the_page_is_that_of_the_results():
    page = build_page(list_studied())
    assert page == PAGE.read_text()
    assert "not measured" not in page


def test_every_variant_is_compared_with_another():
    assert {each for part in PARTS for pair in part.variants.items() for each in pair} >= set(VARIANTS)


def test_differences_are_paired_over_draws_and_budgets_that_have_both():
    variant, full = next(iter(PARTS[0].variants.items()))
    study = Study(
        [
            *make_lines([0.5, None, 0.7], full),
            *make_lines([0.51, 0.9, 0.73], variant),
            *make_lines([0.8], full, "units-0.2"),
            *make_lines([0.75], variant, "units-0.2"),
        ]
    )
    found = study.compare("mlp", study.list_budgets("mlp"), variant, full)
    assert found is not None
    assert sorted(found.pairs) == pytest.approx([-5.0, 1.0, 3.0])
    assert study.compare("lenet5", ["macs-0.3"], variant, full) is None


@pytest.mark.parametrize(
    ("pairs", "verdict"),
    [((1.0, 1.2), "better"), ((-1.0, -1.2), "worse"), ((1.0, -1.2), "no clear difference"), ((3.0,), "no clear")],
)
def test_a_variant_is_better_or_worse_by_more_than_a_standard_error(pairs, verdict):
    assert Difference(pairs).verdict.startswith(verdict)


def test_accuracies_are_means_over_draws():
    lines = make_lines([0.5, 0.6], "quick")
    row = "| quick | 784-300-100-10, Fashion-MNIST | 30% of the multiply-adds | 2 | 55.00 |  | 1.0 |"
    assert row in build_page(lines)
