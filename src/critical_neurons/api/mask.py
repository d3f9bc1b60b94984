"""The public `mask`: a model of the same size in which removed units are zero."""

from __future__ import annotations

from torch import nn

from critical_neurons.core.plan import Plan, check_plan
from critical_neurons.readers import check_architecture, isolated
from critical_neurons.removal.remove import keep_attributes, own_tensors, zero_units
from critical_neurons.structure import unwrap


@isolated
def mask(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of `model` in which all weights of the units that the plan removes are zero.

    Its outputs are those of the smaller model that `prune` makes without compensation. A plan may mask all units of a
    layer.

    >>> masked, removed = cn.mask(model, plan), cn.prune(model, plan, inputs)
    >>> torch.allclose(masked(inputs), removed(inputs), atol=1e-5)
    True
    """
    check_plan(plan, removes=False)
    source = unwrap(model)
    check_architecture(source, plan.architecture, "the plan was")
    masked = own_tensors(zero_units(source, plan.structure, plan.stays), source)
    return keep_attributes(masked, source)
