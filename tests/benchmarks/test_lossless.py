"""The page of lossless removal."""

from __future__ import annotations

from lossless import RESULTS
from lossless_page import HEAD, PAGE, lay_out


def test_the_page_is_that_of_the_results():
    rows = lay_out(RESULTS)
    assert rows
    assert "\n".join(rows) in PAGE.read_text()
    assert all(row.count("|") == HEAD.count("|") for row in rows)
