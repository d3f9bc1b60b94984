"""Compensating: the modules behind removed units refitted, so that what was removed is missed least."""

from critical_neurons.compensating.choosing import TEMPERATURES, Choice, reads_units
from critical_neurons.compensating.deciding import Chosen, Group
from critical_neurons.compensating.eliminating import Elimination
from critical_neurons.compensating.refitting import Refit, can_refit
from critical_neurons.compensating.streaming import Stop, check_inputs, refit_modules

__all__ = [
    "TEMPERATURES",
    "Choice",
    "Chosen",
    "Elimination",
    "Group",
    "Refit",
    "Stop",
    "can_refit",
    "check_inputs",
    "reads_units",
    "refit_modules",
]
