"""The page of lossless removal."""

from __future__ import annotations

from critical_neurons.core.markdown import format_row
from lossless import RESULTS
from lossless_page import HEADER, PAGE, lay_out


def test_the_page_is_that_of_the_results():
    rows = lay_out(RESULTS)
    assert rows
    assert "\n".join(map(format_row, rows)) in PAGE.read_text()
    assert all(len(row) == len(HEADER) for row in rows)
