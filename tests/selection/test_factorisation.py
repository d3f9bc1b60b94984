"""Every choice survives whatever spectrum the matrices have that it is made from."""

import pytest
import torch

import critical_neurons as cn
from critical_neurons.errors import InvalidInputError
from critical_neurons.removal.refit.ridge import add_ridge
from critical_neurons.selection.elimination import Consumer, eliminate, measure_error, take_root
from critical_neurons.selection.factorisation import decompose, factorise
from critical_neurons.selection.lower_bound import bound_error
from critical_neurons.selection.swaps import exchange

SAME = 1e-9
COLUMNS, OUTPUTS = 12, 5

SPECTRA = {
    "zero": torch.zeros(COLUMNS),
    "half of them zero": (torch.arange(COLUMNS) % 2).float(),
    "repeated": torch.ones(COLUMNS),
    "tiny": torch.full((COLUMNS,), 1e-300, dtype=torch.float64),
    "huge": torch.full((COLUMNS,), 1e100, dtype=torch.float64),
    "far apart": 10.0 ** torch.linspace(-30, 30, COLUMNS, dtype=torch.float64),
    "below zero by rounding": torch.tensor([1.0, -1e-9] * (COLUMNS // 2)),
    "far below zero": torch.tensor([1.0, -0.1] * (COLUMNS // 2)),
}


def draw(spectrum, size):
    turn = torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[
        0
    ]
    return turn * spectrum[:size].double() @ turn.T


@pytest.mark.parametrize("metric", SPECTRA)
@pytest.mark.parametrize("squares", SPECTRA)
def test_any_spectrum(squares, metric):
    weight = torch.randn(COLUMNS, OUTPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    consumer = Consumer(
        add_ridge(draw(SPECTRA[squares], COLUMNS)), weight, draw(SPECTRA[metric], OUTPUTS), torch.arange(COLUMNS)
    )
    stays = torch.arange(COLUMNS) % 2 == 0
    assert sorted(eliminate([consumer], COLUMNS).order.tolist()) == list(range(COLUMNS))
    assert exchange([consumer], stays).sum() == stays.sum()
    bound_error([consumer], COLUMNS, COLUMNS // 2)
    measure_error([consumer], stays)


def test_factors_of_regular_matrices_are_exact():
    matrix = draw(torch.linspace(1, 2, COLUMNS), COLUMNS)
    factor = factorise(matrix)
    assert torch.allclose(factor @ factor.T, matrix, atol=SAME)


def test_noise_is_an_error():
    with pytest.raises(InvalidInputError, match="scaled"):
        factorise(torch.full((3, 3), torch.nan, dtype=torch.float64))


def test_where_divide_and_conquer_does_not_converge(monkeypatch):
    matrix = draw(torch.linspace(0, 2, COLUMNS), COLUMNS)
    wanted = take_root(matrix)

    def fail(matrix):
        raise torch.linalg.LinAlgError("linalg.eigh: did not converge")

    monkeypatch.setattr(torch.linalg, "eigh", fail)
    found = take_root(matrix)
    assert torch.allclose(found @ found.T, wanted @ wanted.T, atol=SAME)
    assert decompose(matrix)[0].diff().min() >= 0


@pytest.mark.parametrize("effort", ["quick", "standard"])
def test_units_that_never_fire(effort):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
    )
    with torch.no_grad():
        model[0].bias.fill_(-100.0)
        model[2].weight[4:] = model[2].weight[0]
        model[2].bias[4:] = model[2].bias[0]
    inputs = torch.randn(24, 6)
    scores = cn.search(model, inputs, units=0.5, effort=effort)
    smaller = cn.prune(model, cn.plan(scores), inputs, compensate="least_squares")
    assert torch.allclose(smaller(inputs), model(inputs), atol=1e-5)
