"""The site builds without a warning: no broken link, reference or page that nothing leads to."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
