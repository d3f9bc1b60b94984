"""Batches: labels that cannot be classes of the network."""

import numpy as np
import pytest

from critical_neurons.core.batch import check_classes
from critical_neurons.errors import InvalidInputError


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (1, r"found 1, 2 for a network with one output, .* Leave the labels out"),
        (2, r"found 2\. Accepted: 0 to 1, one for each of the network's 2 outputs"),
    ],
)
def test_labels_outside_of_the_outputs(count, message):
    with pytest.raises(InvalidInputError, match=message):
        check_classes(np.array([0, 1, 2]), count)
    check_classes(np.zeros(3, dtype=np.int64), count)
