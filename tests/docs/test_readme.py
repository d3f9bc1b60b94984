"""The README: its example gives the output it shows, its links lead somewhere, its citation agrees."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
LONGEST = 140
POINTS, SHARE = 2.0, 0.1
"""By how much figures may differ between processors: accuracies in percent, and counts."""

FIGURE = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")


def split(text):
    """The text without its figures, runs of spaces as one, and the figures."""
    figures = [float(each.replace(",", "")) for each in FIGURE.findall(text)]
    return re.sub(r"\s+", " ", FIGURE.sub("#", text)).strip(), figures


def test_it_is_short():
    assert len(TEXT.splitlines()) <= LONGEST


def test_the_example_gives_the_output_it_shows(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    monkeypatch.chdir(tmp_path)
    code, shown = re.search(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL).groups()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(code, "README.md", "exec"), {})
    words, figures = split(output.getvalue())
    words_shown, figures_shown = split(shown)
    assert words == words_shown
    assert figures == pytest.approx(figures_shown, abs=POINTS, rel=SHARE)


def test_links_lead_somewhere():
    found = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)\"", TEXT)
    links = [link.partition("#")[0] for pair in found for link in pair]
    local = [link for link in links if link and "://" not in link]
    assert len(local) > 15
    assert [link for link in local if not (ROOT / link).exists()] == []


def test_the_two_commands_are_there():
    assert re.search(r"^make demo\b", TEXT, re.MULTILINE)
    assert re.search(r"^make test\b", TEXT, re.MULTILINE)


def test_the_citation_agrees():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    paper = citation["preferred-citation"]
    assert paper["title"].replace("ANN", "{ANN}") in TEXT
    assert all(author["family-names"] in TEXT for author in paper["authors"])
    assert f'version = "{citation["version"]}"' in (ROOT / "pyproject.toml").read_text()


def test_the_count_of_architectures_is_the_measured_one():
    page = (ROOT / "docs" / "any-network.md").read_text()
    handled, tried = re.search(r"Handled: critical_neurons (\d+) of (\d+)", page).groups()
    assert f"Of {tried} public architectures {handled} can be made smaller" in TEXT
