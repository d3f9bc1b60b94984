"""The examples of all public names and of the guides, run after the set-up that the API page shows."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest

import critical_neurons as cn

DOCS = Path(__file__).parents[2] / "docs"
GUIDES = sorted(DOCS.glob("guides/*.md"))
PYTHON = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDED_BY_GUIDES = {"deploy": ("onnxscript", "onnxruntime"), "torch-pruning": ("torch_pruning",)}
NEEDS = {"as_torch_pruning": "torch_pruning", "export": "onnxscript", "from_onnx": "onnxruntime"}


@pytest.fixture(scope="module")
def prepared():
    names = {}
    exec((DOCS / "example.py").read_text(), names)
    return names


@pytest.fixture(autouse=True)
def in_a_new_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", cn.__all__)
def test_every_public_name_has_an_example_that_runs(name, prepared):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    example = doctest.DocTestParser().get_doctest(getattr(cn, name).__doc__, dict(prepared), name, None, 0)
    assert example.examples, f"{name}: no example in its docstring"
    output = io.StringIO()
    failed, _ = doctest.DocTestRunner().run(example, out=output.write)
    assert not failed, output.getvalue()


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.stem)
def test_guides_run(guide, prepared):
    for package in NEEDED_BY_GUIDES.get(guide.stem, ()):
        pytest.importorskip(package)
    names = dict(prepared)
    for block in PYTHON.findall(guide.read_text()):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(block, guide.name, "exec"), names)


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda path: path.stem)
def test_what_pages_import_and_call_is_there(page):
    """Of code that needs a cluster or a trained network: it compiles, and names only what is public."""
    for block in PYTHON.findall(page.read_text()):
        compile(block, page.name, "exec")
        assert set(re.findall(r"\bcn\.([A-Za-z_]+)", block)) <= set(cn.__all__)


def test_the_reference_has_every_public_name():
    shown = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", (DOCS / "reference" / "api.md").read_text(), re.M)
    assert sorted(shown) == cn.__all__
