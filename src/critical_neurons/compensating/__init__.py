"""Compensating: the modules behind removed units refitted, so that what was removed is missed least."""

from critical_neurons.compensating.refitting import Refit
from critical_neurons.compensating.streaming import Stop, check_inputs, refit_modules

__all__ = ["Refit", "Stop", "check_inputs", "refit_modules"]
