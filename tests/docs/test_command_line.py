"""The command line reference is what the commands say of themselves."""

from __future__ import annotations

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "docs" / "render_command_line.py"


def test_the_reference_is_current():
    spec = importlib.util.spec_from_file_location("render_command_line", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.PAGE.read_text() == script.render(), "run: python docs/render_command_line.py"
