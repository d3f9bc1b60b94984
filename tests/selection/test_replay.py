"""A model run again from the first module that changed gives what it gives when all of it is run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from critical_neurons.selection.replay import Replay

INPUTS = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Counted(nn.Linear):
    count = 0

    def forward(self, values: Tensor) -> Tensor:
        self.count += 1
        return super().forward(values)


class Block(nn.Module):
    """Adds in place, after a module that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.second = Counted(4, 4), nn.ReLU(inplace=True), Counted(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        out = self.second(self.relu(self.first(values)))
        out += values
        return out.relu_()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), Counted(4, 4), nn.ReLU(inplace=True), Counted(4, 2)).requires_grad_(False)


@pytest.mark.parametrize("name", ["0.first", "0.second", "1.first", "1.second", "2", "4"])
def test_gives_what_the_changed_model_gives(model: nn.Module, name: str) -> None:
    replay = Replay(model, INPUTS)
    changed = model.get_submodule(name)
    changed.weight.data = changed.weight.data + 1
    for _ in range(2):  # what is taken from the first run is still as it was
        assert torch.equal(replay.run({changed}), model(INPUTS))


def test_runs_no_module_that_comes_before(model: nn.Module) -> None:
    replay = Replay(model, INPUTS)
    replay.run({model[2]})
    assert [each.count for each in model.modules() if isinstance(each, Counted)] == [1, 1, 1, 1, 2, 2]


def test_a_module_called_again_is_not_taken_for_its_first_call() -> None:
    torch.manual_seed(0)
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), nn.Sequential(shared, nn.Linear(4, 4)), shared).requires_grad_(False)
    replay = Replay(model, INPUTS)
    model[2][1].weight.data = model[2][1].weight.data + 1
    assert torch.equal(replay.run({model[2][1]}), model(INPUTS))


def test_a_forward_that_goes_another_way_is_run_whole() -> None:
    class Fickle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
            self.turned = False

        def forward(self, values: Tensor) -> Tensor:
            return self.last((self.other if self.turned else self.one)(values))

    model = Fickle().requires_grad_(False)
    replay = Replay(model, INPUTS)
    model.turned = True
    assert torch.equal(replay.run({model.last}), model(INPUTS))


def test_leaves_forwards_as_they_were(model: nn.Module) -> None:
    own = model[4].forward = model[4].forward
    Replay(model, INPUTS).run({model[2]})
    assert model[4].forward is own
    assert "forward" not in vars(model[2])


class Noting(nn.Linear):
    """Keeps what it read, for others."""

    def forward(self, values: Tensor) -> Tensor:
        self.noted = values
        return super().forward(values)


class Odd(nn.Module):
    """Changes its input in place, and reads what a module noted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 4), nn.Sequential(Noting(4, 4), nn.ReLU())
        self.last = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        values.sub_(0.5)
        out = self.last(self.middle(self.first(values)))
        return out + self.middle[0].noted + values


def test_inputs_changed_in_place_and_what_modules_note() -> None:
    torch.manual_seed(0)
    model = Odd().requires_grad_(False)
    given = INPUTS.clone()
    replay = Replay(model, given)
    wanted = model(INPUTS.clone())
    model.first.weight.mul_(2)
    replay.run({model.first})
    model.first.weight.div_(2)
    for _ in range(2):
        assert torch.equal(replay.run({model.last}), wanted)
    assert torch.equal(given, INPUTS)
