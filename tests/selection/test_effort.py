"""Effort: a higher effort spends more, and an unknown name is an error."""

from __future__ import annotations

import pytest

from critical_neurons.errors import InvalidSettingError
from critical_neurons.selection.effort import choose_effort


def test_unknown_efforts_are_reported():
    with pytest.raises(
        InvalidSettingError, match=r"effort: found 'most'\. Accepted: 'quick', 'standard', 'thorough'"
    ):
        choose_effort("most")
