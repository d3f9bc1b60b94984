"""Every choice survives whatever spectrum the matrices have that it is made from."""

import pytest
import torch

import critical_neurons as cn
from critical_neurons.errors import InvalidInputError
from critical_neurons.selection.elimination import Consumer, eliminate, measure_error
from critical_neurons.selection.factorisation import factorise, take_root
from critical_neurons.selection.inverses import invert
from critical_neurons.selection.lower_bound import bound_error

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
    felt = weight @ take_root(draw(SPECTRA[metric], OUTPUTS))
    consumer = Consumer(invert(draw(SPECTRA[squares], COLUMNS)), felt, torch.arange(COLUMNS))
    stays = torch.arange(COLUMNS) % 2 == 0
    assert sorted(eliminate([consumer], COLUMNS).order.tolist()) == list(range(COLUMNS))
    bound_error([consumer], COLUMNS, COLUMNS // 2)
    measure_error([consumer], stays)


def test_factors_of_regular_matrices_are_exact():
    matrix = draw(torch.linspace(1, 2, COLUMNS), COLUMNS)
    factor = factorise(matrix)
    assert torch.allclose(factor @ factor.T, matrix, atol=SAME)


def test_noise_is_an_error():
    with pytest.raises(InvalidInputError, match="scaled"):
        factorise(torch.full((3, 3), torch.nan, dtype=torch.float64))


@pytest.mark.parametrize("spectrum", [name for name in SPECTRA if "below" not in name])
def test_roots_are_exact_and_as_narrow_as_the_rank(spectrum):
    matrix = draw(SPECTRA[spectrum], COLUMNS)
    root = take_root(matrix)
    assert torch.allclose(root @ root.T, matrix, rtol=0, atol=SAME * float(matrix.abs().max()))
    assert root.shape[1] <= torch.linalg.matrix_rank(matrix)


def test_of_a_matrix_that_is_not_quite_positive_the_root_is_of_the_nearest():
    matrix = draw(SPECTRA["below zero by rounding"], COLUMNS)
    root = take_root(matrix)
    assert torch.allclose(root @ root.T, matrix, atol=1e-6)


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
