"""Law: scores at 1 give the network's own logits, and the forward pass is a feasible point."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.full_space import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from tests.zoo import UNSCORED, ZOO, share_case

LOGIT_TOLERANCE = 1e-10
ROW_TOLERANCE = 1e-10


@pytest.mark.parametrize("radius", [0.0, 0.05])
@pytest.mark.parametrize("encode", [encode_paper, encode_literal])
@pytest.mark.parametrize("name", ZOO)
def test_start_is_feasible_and_gives_the_logits(name, encode, radius):
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=radius)
    program = encode(case.network, bounds, case.labels, Objective())
    with torch.no_grad():
        expected = case.model(torch.from_numpy(case.inputs))
    logits = torch.from_numpy(program.term.model.logits(program.start))
    assert torch.allclose(ZOO[name].finish(logits), expected, rtol=0, atol=LOGIT_TOLERANCE)
    assert np.all(program.start[program.blocks["score"]] == 1)
    start, whole = program.start, program.write_out()
    values = whole.rows.matrix @ start
    assert np.all(program.lower <= start)
    assert np.all(start <= program.upper)
    assert np.all(start[program.integer] % 1 == 0)
    assert np.all(whole.rows.lower - ROW_TOLERANCE <= values)
    assert np.all(values <= whole.rows.upper + ROW_TOLERANCE)
    assert np.all(start[program.term.columns] >= program.term.values(start))
    assert all(source.violations(start).max() <= ROW_TOLERANCE for source in program.sources)


@pytest.mark.parametrize(("name", "layer"), UNSCORED.items())
def test_zoo_has_layers_without_scores(name, layer):
    network = share_case(name).network
    (found,) = [candidate for candidate in network.layers if candidate.name == layer]
    assert found.reason
    assert network.unit_count > 0
