"""The site builds without a warning: no broken link, reference or page that nothing leads to. It fits its screen."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.browser import FOUND, Browser

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.slow
def test_the_site_builds_without_warnings(tmp_path):
    for package in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(package)
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--quiet", "--builder", "html"]
    places = ["--doctree-dir", tmp_path / "doctrees", DOCS, tmp_path / "html"]
    done = subprocess.run([*command, *places], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "html" / "reference" / "api.html").read_text()
    assert 'id="critical_neurons.compress"' in page
    assert "&gt;&gt;&gt; " in page  # the examples
    assert find_broken_links(tmp_path / "html") == []
    if FOUND is not None:
        assert find_wide_pages(tmp_path / "html") == []


def find_broken_links(site: Path) -> list[tuple[str, str]]:
    """Links within the site to a page, file or place that is not there."""
    texts = {path: path.read_text() for path in site.rglob("*.html")}
    broken = []
    for path, text in texts.items():
        for link in map(html.unescape, re.findall(r'(?:href|src)="([^"]+)"', text)):
            file, _, place = link.partition("#")
            aim = (path.parent / unquote(file.partition("?")[0])).resolve() if file else path
            if "://" in link or link.startswith(("mailto:", "data:")):
                continue
            if not aim.exists() or (place and aim in texts and f'id="{unquote(place)}"' not in texts[aim]):
                broken.append((path.name, link))
    return broken


def find_wide_pages(site: Path) -> list[tuple[str, int]]:
    """Pages that must be moved sideways to be read on a phone or on a wide screen."""
    browser = Browser()
    try:
        wide = []
        for path, width in product(sorted(site.rglob("*.html")), (360, 1600)):
            if "_modules" not in path.parts:
                browser.open(path, width=width)
                if browser.run("document.documentElement.scrollWidth > document.documentElement.clientWidth"):
                    wide.append((path.name, width))
        return wide
    finally:
        browser.close()
