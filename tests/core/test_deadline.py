"""Whatever takes long in a large network stops in time; on small ones it is repeated until it would."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from scipy import sparse

import critical_neurons as cn
from critical_neurons.core import deadline
from critical_neurons.core.deadline import TimeIsUp, reading_until, until
from critical_neurons.core.program import Origins
from critical_neurons.errors import SolverError
from critical_neurons.formulations import encode_literal
from critical_neurons.formulations.objective import Objective
from critical_neurons.readers import run_model
from critical_neurons.solvers.newton_steps import NewtonState
from critical_neurons.structure import find_structure
from tests.zoo import share_case

CASE = share_case("groups")
INPUTS = torch.from_numpy(CASE.inputs)


def bound():
    return cn.bound_network(CASE.network, CASE.inputs)


def encode():
    return cn.encode(CASE.network, cn.bound_network(CASE.network, CASE.inputs, radius=0.1), CASE.labels)


STEPS = {
    "structure": lambda: find_structure(CASE.model, INPUTS),
    "reading": lambda: cn.read_network(CASE.model, INPUTS, structure=CASE.network.structure),
    "running": lambda: run_model(CASE.model, CASE.inputs, CASE.network.span),
    "bounding": bound,
    "the program as printed": lambda: encode_literal(CASE.network, BOUNDS, CASE.labels, Objective()),
    "fronts": lambda: NewtonState(START, (START - 1, START + 1), 1.0, ORIGINS, ROWS).add(ROWS, np.zeros(40)),
    "all rows": lambda: PROGRAM.write_out(),
}
BOUNDS, PROGRAM = bound(), encode()
ROWS, START = sparse.csr_array(np.eye(40)), np.zeros(40)
ORIGINS = Origins(np.arange(40) % 4, np.zeros(40, dtype=np.int64))


@pytest.mark.parametrize("step", STEPS)
def test_every_step_stops_in_time(step):
    def repeat():
        while True:
            STEPS[step]()

    STEPS[step]()
    with pytest.raises(TimeIsUp), until(time.monotonic() + 1e-3):
        repeat()
    STEPS[step]()


def test_a_model_that_takes_longer_to_read_than_the_limit_is_reported(monkeypatch):
    monkeypatch.setattr(deadline, "GRACE", 0.0)
    with pytest.raises(SolverError, match=r"time_limit: 1e-09 s were over before the model was read\. Allow more\."):
        cn.score(CASE.model, CASE.inputs, solver=cn.Solver(time_limit=1e-9))
    with pytest.raises(SolverError, match="before the model was read"):
        cn.lossless(CASE.model, (-9.0, 9.0), inputs=INPUTS, time_limit=1e-9)
    with reading_until(time.monotonic(), 60.0):
        pass
