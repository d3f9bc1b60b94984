"""Hooks: every one is set when the package is imported, and finds what carries it out."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from critical_neurons.core.hooks import _FINDERS, Hook


@pytest.mark.parametrize("name", get_args(Hook))
def test_finds_a_function_of_its_name(name):
    assert _FINDERS[name]().__name__ == name


def test_data_imports_nothing_that_carries_it_out():
    code = (
        "import sys\n"
        "from critical_neurons.core import comparison, curve, plan, scores\n"
        "found = [name for name in sys.modules if name.startswith('critical_neurons.')]\n"
        "assert all(name.split('.')[1] in ('core', 'errors', 'interrupted_start') for name in found), found"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
