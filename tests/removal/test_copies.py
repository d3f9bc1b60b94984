"""Copies of models: what is shared stays shared, and nothing of the original is touched."""

from __future__ import annotations

import torch
from torch import nn

from critical_neurons.removal.copies import copy_sharing, copy_viewing, copy_whole
from critical_neurons.removal.remove import zero_units
from critical_neurons.structure import find_structure


def build():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    memory = torch.arange(6.0)
    for name, values in (("first", memory[:4]), ("second", memory[2:]), ("again", model[1].running_mean)):
        model.register_buffer(name, values)
    return model.eval()


def test_whole_copies_have_tensors_of_their_own():
    model = build()
    copied = copy_whole(model)
    theirs = {values.data_ptr() for values in model.state_dict().values()}
    assert all(values.data_ptr() not in theirs for values in copied.state_dict().values())
    assert all(torch.equal(values, model.state_dict()[name]) for name, values in copied.state_dict().items())


def test_sharing_copies_share_parameters_alone():
    model = build()
    copied = copy_sharing(model)
    assert all(one is other for one, other in zip(model.parameters(), copied.parameters(), strict=True))
    copied[1].running_mean.fill_(7.0)
    assert not model[1].running_mean.any()


class Scaled(nn.Parameter):
    """A parameter with a class and an attribute of its own."""


def test_viewing_copies_share_memory_until_they_get_other_data():
    model = build()
    model[3].weight = Scaled(model[3].weight.detach(), requires_grad=False)
    model[3].weight.scale = 2.0
    model.again = model[3]
    copied, before = copy_viewing(model), model[3].weight.clone()
    pairs = list(zip(model.parameters(), copied.parameters(), strict=True))
    assert all(one is not other and one.data_ptr() == other.data_ptr() for one, other in pairs)
    assert all(one.requires_grad == other.requires_grad for one, other in pairs)
    copied[3].weight.data = torch.ones(2, 4)
    assert torch.equal(model[3].weight, before)
    assert type(copied[3].weight) is Scaled
    assert copied[3].weight.scale == 2.0
    assert copied.again is copied[3]


def test_tensors_of_one_memory_stay_so():
    copied = copy_whole(build())
    copied.first[2] = 70.0
    assert copied.second[0] == 70.0
    assert copied.again is copied[1].running_mean


def test_views_of_a_whole_buffer_stay_views():
    model = build()
    model.register_buffer("shaped", model[1].running_var.view(2, 2))
    copied = copy_whole(model)
    copied[1].running_var[3] = 70.0
    assert copied.shaped[1, 1] == 70.0


def test_hooks_are_not_shared():
    """Of a module without hooks the copy has a dict of its own to put some in."""
    model = build()
    copied = copy_sharing(model)
    copied[0].register_forward_hook(lambda module, args, output: output * 0)
    assert not model[0]._forward_hooks
    assert copied[0]._forward_hooks
    assert not copied[3]._forward_hooks


class Knot(nn.Module):
    """Refers to itself and to one part twice, and has what only a deep copy copies."""

    def __init__(self):
        super().__init__()
        self.part = nn.GRU(2, 3)
        self.parts = {"again": [self.part], "me": (self,)}
        self.seen = [self.part(torch.rand(1, 1, 2))[0]]
        self.part.seen = self.seen[0]


def test_what_modules_refer_to_is_copied_once():
    model = Knot()
    for copied in (copy_whole(model), copy_sharing(model)):
        assert copied.parts["again"][0] is copied.part is not model.part
        assert copied.parts["me"][0] is copied is not model
        assert copied.part.seen is copied.seen[0] is not model.seen[0]
        assert model.seen[0].grad_fn is not None
        assert copied.seen[0].grad_fn is None


def test_a_class_may_copy_itself():
    class Counted(nn.Linear):
        def __deepcopy__(self, memo):
            made = Counted(3, 2)
            made.copies = getattr(self, "copies", 0) + 1
            return made

    assert copy_whole(nn.Sequential(Counted(3, 2)))[0].copies == 1


def test_zeroed_copies_leave_double_weights_alone():
    model = build().double()
    before = {name: values.clone() for name, values in model.state_dict().items()}
    structure = find_structure(model, torch.rand(2, 3, dtype=torch.float64))
    stays = torch.ones(structure.unit_count + 1, dtype=torch.bool).numpy()
    stays[1] = False
    masked = zero_units(model, structure, stays)
    assert not masked[3].weight[:, 1].any()
    assert masked[1].running_var[1] == 1.0
    assert all(torch.equal(values, before[name]) for name, values in model.state_dict().items())
