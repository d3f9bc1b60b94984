"""What every ReLU subtracts: all its unit has, less what the unit has lost on the way; numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from critical_neurons.core.network import Relu
from critical_neurons.core.structure import NO_UNIT
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.shrinkage import find_shrinks
from critical_neurons.readers import read_network
from tests.zoo import CHAINS, ZOO, share_case

ROUNDING = 1e-12


class Graph(nn.Module):
    """`stem` copies the input of two features; `other` gives the numbers given, whatever it reads."""

    def __init__(self, forward, other=(0.0, 0.0), head=2, **modules):
        super().__init__()
        self.stem, self.other, self.head = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(head, 2)
        for name, module in modules.items():
            self.add_module(name, module)
        self.run = forward
        with torch.no_grad():
            self.stem.weight.copy_(torch.eye(2))
            self.stem.bias.zero_()
            self.other.weight.zero_()
            self.other.bias.copy_(torch.tensor(other))

    def forward(self, x):
        return self.head(self.run(self, x))


def shrinks_of(model, inputs=((3.0, 5.0),), radius=0.0):
    """The shrinks of every ReLU, in order, on one data point."""
    values = torch.tensor(inputs, dtype=torch.float64)
    network = read_network(model.double().eval(), values)
    found = find_shrinks(network, bound_network(network, values.numpy(), radius=radius))
    return [
        np.broadcast_to(found[index], (len(values), *op.shape))[0].tolist()
        for index, op in enumerate(network.ops)
        if isinstance(op, Relu)
    ]


def test_a_layer_by_itself_loses_its_upper_bound():
    assert shrinks_of(Graph(lambda m, x: F.relu(m.stem(x)))) == [[3.0, 5.0]]
    assert shrinks_of(Graph(lambda m, x: F.relu(m.stem(x))), [(3.0, -5.0)]) == [[3.0, 0.0]]
    assert shrinks_of(Graph(lambda m, x: F.relu(m.stem(x))), [(3.0, -0.25)], radius=0.5) == [[3.5, 0.25]]


def test_a_stream_loses_only_what_is_new():
    """relu(3 + 1): of the 4 the skip has lost 3. relu(5 - 2): of the 3 the skip has lost 5, so 2 are given back."""

    def forward(m, x):
        stream = F.relu(m.stem(x))
        return F.relu(stream + m.other(x))

    assert shrinks_of(Graph(forward, other=(1.0, -2.0))) == [[3.0, 5.0], [1.0, -2.0]]


def test_a_dead_relu_of_a_stream_gives_back_what_the_skip_has_lost():
    """relu(3 - 4) = 0: the skip has lost 3, so at s = 0 the sum would be -4 and not -1."""

    def forward(m, x):
        return F.relu(F.relu(m.stem(x)) + m.other(x))

    assert shrinks_of(Graph(forward, other=(-4.0, 0.0))) == [[3.0, 5.0], [-3.0, 0.0]]


def test_behind_a_dead_relu_nothing_is_lost():
    """The first ReLU of the stream loses 3, the second, relu(3 - 4), is dead: the third starts anew with 4."""

    def forward(m, x):
        return F.relu(F.relu(F.relu(m.stem(x)) + m.other(x)) + m.third(x))

    model = Graph(forward, other=(-4.0, 0.0), third=nn.Linear(2, 2))
    with torch.no_grad():
        model.third.weight.zero_()
        model.third.bias.copy_(torch.tensor([4.0, 1.0]))
    assert shrinks_of(model) == [[3.0, 5.0], [-3.0, 0.0], [4.0, 1.0]]


def test_a_stream_added_to_itself_has_lost_twice():
    def forward(m, x):
        stream = F.relu(m.stem(x))
        return F.relu(stream + stream + m.other(x))

    assert shrinks_of(Graph(forward, other=(1.0, 2.0))) == [[3.0, 5.0], [1.0, 2.0]]


def test_relu6_loses_at_most_six():
    """min(max(8, 0), 6) = max(8, 0) - max(8 - 6, 0): 8 and 2. Then relu(6 + 1): 1 and nothing more."""

    def forward(m, x):
        return F.relu(F.relu6(m.stem(x)) + m.other(x))

    assert shrinks_of(Graph(forward, other=(1.0, 1.0)), [(8.0, 5.0)]) == [[8.0, 5.0], [2.0, 0.0], [1.0, 1.0]]


def test_a_second_relu_loses_nothing():
    assert shrinks_of(Graph(lambda m, x: F.relu(F.relu(m.stem(x))))) == [[3.0, 5.0], [0.0, 0.0]]


def test_a_layer_that_mixes_starts_anew():
    """relu(3 + 5 + 1): its own unit has lost nothing yet."""

    def forward(m, x):
        return F.relu(m.other(F.relu(m.stem(x))))

    model = Graph(forward, other=(1.0, 1.0))
    with torch.no_grad():
        model.other.weight.fill_(1.0)
    assert shrinks_of(model) == [[3.0, 5.0], [9.0, 9.0]]


def test_a_concatenation_keeps_account_of_its_parts():
    """A part behind a ReLU has lost all it has, the other nothing."""

    def forward(m, x):
        return F.relu(torch.cat([F.relu(m.stem(x)), m.other(x)], 1))

    assert shrinks_of(Graph(forward, other=(1.0, 2.0), head=4)) == [[3.0, 5.0], [0.0, 0.0, 1.0, 2.0]]


def test_a_batch_norm_scales_what_is_lost():
    """Pre-activation: the stream itself has lost nothing, each ReLU loses all that it reads."""

    def forward(m, x):
        stream = m.stem(x)
        return F.relu(m.norm(stream + m.other(F.relu(stream))))

    norm = nn.BatchNorm1d(2, eps=0.0)
    with torch.no_grad():
        norm.weight.copy_(torch.tensor([2.0, -1.0]))
        norm.bias.copy_(torch.tensor([0.0, 7.0]))
    assert shrinks_of(Graph(forward, other=(1.0, 1.0), norm=norm)) == [[3.0, 5.0], [8.0, 1.0]]


IMAGE = [[[[1.0, 2.0], [4.0, -1.0]]]]


def test_a_depthwise_convolution_passes_on_what_is_lost():
    """Channel 0 is the image, channel 1 twice the image; each is filtered: 10 x - 3 and x + 1."""
    model = nn.Sequential(
        *(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Conv2d(2, 2, 1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1))
        model[0].bias.zero_()
        model[2].weight.copy_(torch.tensor([10.0, 1.0]).reshape(2, 1, 1, 1))
        model[2].bias.copy_(torch.tensor([-3.0, 1.0]))
    first, second = shrinks_of(model, IMAGE)
    assert first == [[[1.0, 2.0], [4.0, 0.0]], [[2.0, 4.0], [8.0, 0.0]]]
    # top 7, 17, 37, 0 less 10, 20, 40, 0, and top 3, 5, 9, 1 less 2, 4, 8, 0
    assert second == [[[-3.0, -3.0], [-3.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]]


class Pooled(nn.Module):
    """With two channels that are the same: a single one would have no score."""

    def __init__(self, pool, offset):
        super().__init__()
        self.stem, self.other, self.head = nn.Conv2d(1, 2, 1), nn.Conv2d(1, 2, 2), nn.Linear(2, 2)
        self.pool = pool
        with torch.no_grad():
            for module, weight, bias in ((self.stem, 1.0, 0.0), (self.other, 0.0, offset)):
                module.weight.fill_(weight)
                module.bias.fill_(bias)

    def forward(self, x):
        return self.head(F.relu(self.pool(F.relu(self.stem(x))) + self.other(x)).flatten(1))


@pytest.mark.parametrize(("pool", "lost"), [(nn.MaxPool2d(2), 4.0), (nn.AvgPool2d(2), 1.75)], ids=["max", "average"])
def test_pools_pass_on_what_is_lost(pool, lost):
    """Behind the pool the stream has what it has lost; the branch adds 1."""
    first, second = shrinks_of(Pooled(pool, 1.0), IMAGE)
    assert first == [[[1.0, 2.0], [4.0, 0.0]]] * 2
    assert second == [[[pytest.approx(lost + 1.0 - lost)]]] * 2
    first, second = shrinks_of(Pooled(pool, -10.0), IMAGE)
    assert second == [[[pytest.approx(-lost)]]] * 2


@pytest.mark.parametrize("radius", [0.0, 0.05])
@pytest.mark.parametrize("name", CHAINS)
def test_chains_lose_their_upper_bounds(name, radius):
    """As printed in the paper: where no unit comes to a second ReLU, max(U, 0), and nothing without a score."""
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=radius)
    found = find_shrinks(case.network, bounds)
    assert list(found) == list(bounds.before_relu)
    for index, interval in bounds.before_relu.items():
        scored = np.broadcast_to(case.network.ops[index].units != NO_UNIT, interval.upper.shape)
        assert np.array_equal(found[index], np.where(scored, np.maximum(interval.upper, 0.0), 0.0))


@pytest.mark.parametrize("name", ZOO)
def test_without_a_score_nothing_is_lost(name):
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=0.05)
    for index, shrink in find_shrinks(case.network, bounds).items():
        scored = np.broadcast_to(case.network.ops[index].units != NO_UNIT, bounds.before_relu[index].upper.shape)
        assert np.all(np.broadcast_to(shrink, scored.shape)[~scored] == 0)
