"""Effort: what "standard" makes of networks small and large."""

from __future__ import annotations

import pytest

from critical_neurons.errors import InvalidSettingError
from critical_neurons.selection.effort import LARGE, MEDIUM, QUICK, THOROUGH, choose_effort


@pytest.mark.parametrize(
    ("numbers", "columns", "expected"),
    [
        (10**8, 10**4, THOROUGH),
        (10**8 + 1, 1024, MEDIUM),
        (10**9, 1024, MEDIUM),
        (10**9, 1025, LARGE),
        (10**9 + 1, 9, LARGE),
    ],
)
def test_by_the_size_of_the_network(numbers, columns, expected):
    assert choose_effort("standard", numbers, columns) is expected
    assert choose_effort("quick", numbers, columns) is QUICK
    assert choose_effort("thorough", numbers, columns) is THOROUGH


def test_a_single_choice():
    assert [each.single for each in (QUICK, LARGE, MEDIUM, THOROUGH)] == [True, True, False, False]


def test_other_names_are_refused():
    with pytest.raises(
        InvalidSettingError, match=r"effort: found 'most'\. Accepted: 'quick', 'standard', 'thorough'"
    ):
        choose_effort("most", 1, 1)
