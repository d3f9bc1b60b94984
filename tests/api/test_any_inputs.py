"""Inputs that are no batch of rows: the whole way, from a search to an ONNX file."""

import pytest
import torch
from torch import nn

import critical_neurons as cn
from tests.structure.idioms import Written


def make_graph():
    """Nodes and the matrix of their edges; weights are parameters of no layer."""

    def run(model, x, edges):
        return model.out(edges @ (x @ model.weight).relu())

    model = Written(run, out=nn.Linear(8, 3))
    model.weight = nn.Parameter(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)))
    return model, (torch.rand(12, 5), torch.rand(12, 12))


def make_texts():
    """Words of several texts one behind the other, and where each begins."""
    model = Written(
        lambda m, x, more: m.out(m.words(x, more["offsets"])), words=nn.EmbeddingBag(20, 8), out=nn.Linear(8, 3)
    )
    return model, (torch.arange(15), {"offsets": torch.tensor([0, 4, 9])})


def make_states():
    """A sequence that comes first, and the state of a recurrent layer within a tuple."""

    def run(model, x, state):
        found, _ = model.recurrent(model.read(x), state)
        return model.out(model.hidden(found).relu())

    parts = {"read": nn.Linear(3, 4), "recurrent": nn.LSTM(4, 5), "hidden": nn.Linear(5, 8), "out": nn.Linear(8, 2)}
    return Written(run, **parts), (torch.rand(6, 2, 3), (torch.zeros(1, 2, 5), torch.zeros(1, 2, 5)))


@pytest.mark.parametrize("make", [make_graph, make_texts, make_states])
@pytest.mark.parametrize("effort", ["quick", "standard"])
def test_search_and_prune(make, effort):
    model, inputs = make()
    plan = cn.plan(cn.search(model, inputs, units=0.5, effort=effort))
    smaller = cn.prune(model, plan, inputs, compensate="least_squares")
    assert smaller.out.in_features == 4
    comparison = cn.compare(model, smaller, inputs, onnx=False, repeats=1, batch_sizes=(1,))
    assert comparison.after.macs < comparison.before.macs or make is make_texts
    assert comparison.difference < 1


@pytest.mark.slow
@pytest.mark.parametrize("make", [make_texts, make_graph])
def test_export(make, tmp_path):
    model, inputs = make()
    assert cn.export(model, tmp_path / "model.onnx", inputs).difference < 1e-5


def test_numbers_of_rows_that_do_not_fit():
    model, (nodes, edges) = make_graph()
    plan = cn.plan(cn.search(model, (nodes, edges), units=0.5, effort="quick"))
    for verb in (lambda given: cn.search(model, given, units=0.5), lambda given: cn.prune(model, plan, given)):
        with pytest.raises(cn.errors.InvalidInputError, match=r"does not run on \(11, 5\), \(12, 12\): "):
            verb((nodes[1:], edges))


def test_no_multiply_adds_to_count():
    model = Written(lambda m, x, y: (m.one(x) * m.other(y)).sum(1), one=nn.Embedding(9, 8), other=nn.Embedding(9, 8))
    numbers = torch.arange(9)
    with pytest.raises(cn.errors.InvalidSettingError, match=r"none that was counted\. Give units= or"):
        cn.search(model, (numbers, numbers), macs=0.5)
    plan = cn.plan(cn.search(model, (numbers, numbers), units=0.5, effort="quick"))
    assert cn.prune(model, plan, (numbers, numbers)).one.embedding_dim == 4


@pytest.mark.parametrize("compensate", ["none", "least_squares"])
def test_outputs_that_begin_with_another_axis(compensate):
    """The batch behind the steps of time, or not there at all: the same distance as where it comes first."""

    def search(arrange):
        torch.manual_seed(0)
        parts = {"hidden": nn.Linear(3, 6), "out": nn.Linear(6, 2)}
        model = Written(lambda m, x: arrange(m.out(m.hidden(x).relu())), **parts)
        return cn.search(model, torch.randn(20, 7, 3), units=0.5, effort="quick", compensate=compensate)

    first, second = search(lambda values: values), search(lambda values: values.transpose(0, 1))
    if compensate == "least_squares":  # gates draw rows, of which there is one now
        assert (first.per_unit >= 0.5).tolist() == (second.per_unit >= 0.5).tolist()
        assert second.objective == pytest.approx(first.objective, rel=1e-3)
    assert 0 < second.objective < 10
    assert search(torch.sum).objective > 0
