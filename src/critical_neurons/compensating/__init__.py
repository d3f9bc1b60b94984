"""Compensating: the modules behind removed units refitted, so that what was removed is missed least."""

from critical_neurons.compensating.choosing import Choice, Chosen, Group, reads_units
from critical_neurons.compensating.refitting import MOST_COLUMNS, Refit
from critical_neurons.compensating.streaming import Stop, check_inputs, refit_modules

__all__ = [
    "MOST_COLUMNS",
    "Choice",
    "Chosen",
    "Group",
    "Refit",
    "Stop",
    "check_inputs",
    "reads_units",
    "refit_modules",
]
