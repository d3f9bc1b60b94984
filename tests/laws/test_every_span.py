"""Laws of spans, at every layer of the zoo: either end may stand there, unless it is no single path."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import critical_neurons as cn
from critical_neurons.core.plan import Plan
from critical_neurons.core.span import Span
from critical_neurons.errors import InvalidSettingError
from critical_neurons.readers import read_network, run_model
from tests.zoo import CHAINS, ZOO, share_case

SAME_LOGITS = 1e-9
"""Largest difference between the logits of a model and of the program of a span, every score at 1."""

SAME_OBJECTIVE = 1e-6
"""Largest relative difference between the objectives of two programs that are the same."""

PATHS = ("mlp", "nest", "clamps", "resnet", "concatenation on a stream", "tokens", "vgg")
"""Chains, modules inside modules, streams that no span may cut, and what lies on either side of an end."""


def list_spans(name):
    """From every layer on, and up to every layer."""
    layers = [layer.name for layer in share_case(name).network.layers]
    return [*(Span(start=layer) for layer in layers), *(Span(stop=layer) for layer in layers)]


@cache
def read(name, span):
    """The network of the span, if it is a single path."""
    case = share_case(name)
    try:
        return read_network(case.model, torch.from_numpy(case.inputs), start=span.start, stop=span.stop)
    except InvalidSettingError as error:
        if "single path" in str(error):
            return None
        raise


@pytest.mark.networks(*PATHS)
@pytest.mark.parametrize("name", ZOO)
def test_the_program_of_a_span_gives_the_logits_of_the_model(name):
    case = share_case(name)
    expected = run_model(case.model, case.inputs, Span()).logits
    found = 0
    for span in list_spans(name):
        network = read(name, span)
        if network is None:
            assert name not in CHAINS
            continue
        passage = run_model(case.model, case.inputs, span)
        assert passage.inputs.shape[1:] == network.input_shape
        assert np.abs(passage.logits - expected).max() <= SAME_LOGITS
        if network.removable:
            bounds = cn.bound_network(network, passage.inputs)
            program = cn.encode(network, bounds, case.labels, tail=passage.tail)
            assert np.abs(program.term.logits(program.unpruned) - expected).max() <= SAME_LOGITS
            found += 1
    assert found


@pytest.mark.networks(*PATHS)
@pytest.mark.parametrize("name", ZOO)
def test_masked_is_removed(name):
    """Every other unit of what can be scored goes; `prune` compares the smaller model with the masked one."""
    case = share_case(name)
    for span in list_spans(name):
        network = read(name, span)
        if network is None or not network.removable or any(layer.blocks > 1 for layer in network.removable):
            continue
        stays = np.append(np.arange(network.unit_count) % 2 == 0, True)
        cn.prune(case.model, Plan(network.structure, stays, {}, "drawn", {}, network.span), case.inputs)


@pytest.mark.parametrize("name", CHAINS)
def test_linearised_a_tail_of_readable_layers_is_its_own_expansion(name):
    """With gates as at the data points, what follows is affine already: ignoring its layers is the same program."""
    case = share_case(name)
    layers = [layer.name for layer in case.network.layers]
    for at, stop in enumerate(layers):
        if not read(name, Span(stop=stop)).removable:
            continue
        found = cn.score(case.model, case.inputs, case.labels, formulation="linearised", stop=stop)
        expected = cn.score(case.model, case.inputs, case.labels, formulation="linearised", ignore=layers[at:])
        assert list(found) == list(expected)
        assert found.objective == pytest.approx(expected.objective, rel=SAME_OBJECTIVE, abs=SAME_OBJECTIVE)
