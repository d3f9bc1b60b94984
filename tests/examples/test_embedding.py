"""The example of a network inside an optimisation problem."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from critical_neurons.core.markdown import format_row

ROOT = Path(__file__).parents[2]
SAME_OPTIMUM = 1e-4
"""Of two programs that SCIP solves to its own tolerances."""


@pytest.fixture(scope="module")
def embed():
    spec = importlib.util.spec_from_file_location("embed", ROOT / "examples" / "embedding" / "embed.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_optimum_stays_where_nothing_is_lost(embed):
    pytest.importorskip("pyscipopt_ml")
    model = embed.train(8, steps=300)
    networks = embed.make_smaller(model)
    found = {name: embed.judge(network, embed.draw_prices(1), 60.0) for name, network in networks.items()}
    assert found["lossless"]["optimum"] == pytest.approx(found["as trained"]["optimum"], abs=SAME_OPTIMUM)
    assert found["half the units, lossless"]["optimum"] == pytest.approx(
        found["half the units"]["optimum"], abs=SAME_OPTIMUM
    )
    assert found["half the units"]["units"] == 8
    points = torch.rand(100, embed.INPUTS)
    torch.testing.assert_close(networks["lossless"](points), model(points), rtol=1e-4, atol=1e-4)


def test_the_page_is_that_of_the_results(embed):
    records = map(json.loads, (ROOT / "benchmarks" / "results" / "embedding.jsonl").read_text().splitlines())
    page = embed.PAGE.read_text()
    assert all(format_row(row) in page for row in embed.lay_out(list(records)))
