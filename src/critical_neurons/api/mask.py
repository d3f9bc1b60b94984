"""The public `mask`: model and plan to a model of the same size with the removed units at zero."""

from __future__ import annotations

from torch import nn

from critical_neurons.core.plan import Plan, check_plan
from critical_neurons.readers import check_architecture, on_cpu, unwrap
from critical_neurons.removal.mask import hold_at_zero


@on_cpu
def mask(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model, of the same size, with the activations of the removed units held at zero."""
    check_plan(plan)
    source = unwrap(model)
    check_architecture(source, plan.architecture, "the plan was")
    return hold_at_zero(source, plan)
