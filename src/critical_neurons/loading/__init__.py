"""Loading: names and paths from the command line to a model and a batch."""

from critical_neurons.loading.batches import Batch, Look, is_file, load_batch
from critical_neurons.loading.models import load_model

__all__ = ["Batch", "Look", "is_file", "load_batch", "load_model"]
