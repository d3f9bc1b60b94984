"""Structure: what can be removed from any nn.Module, found by one run on an example."""

from critical_neurons.structure import arithmetic as _arithmetic  # noqa: F401  registers rules
from critical_neurons.structure import channels as _channels  # noqa: F401  so does this
from critical_neurons.structure import moving as _moving  # noqa: F401  so does this
from critical_neurons.structure import pieces as _pieces  # noqa: F401  so does this
from critical_neurons.structure import products as _products  # noqa: F401  so does this
from critical_neurons.structure import weights as _weights  # noqa: F401  so does this
from critical_neurons.structure.find import convert_to_double, find_structure, join_rows
from critical_neurons.structure.run import OUTPUT
from critical_neurons.structure.source import check_model, copy_model, fingerprint, unwrap
from critical_neurons.structure.within_span import select_span

__all__ = [
    "OUTPUT",
    "check_model",
    "convert_to_double",
    "copy_model",
    "find_structure",
    "fingerprint",
    "join_rows",
    "select_span",
    "unwrap",
]
