"""Loading: names and paths from the command line to a model, inputs and labels."""

from critical_neurons.loading.batches import Look, is_file, load_batch
from critical_neurons.loading.models import load_model

__all__ = ["Look", "is_file", "load_batch", "load_model"]
