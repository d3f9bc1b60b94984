"""Sphinx settings of the documentation, built by `make docs`."""

from __future__ import annotations

import re
from importlib.metadata import version as find_version
from typing import Any

import critical_neurons as cn

project = "critical_neurons"
copyright = "the contributors, MIT licence"
author = "The critical_neurons contributors"
release = version = find_version("critical_neurons")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # the tests run the notebooks

nitpicky = True
nitpick_ignore_regex = [
    ("py:class", ".*")
]  # types in signatures: aliases, and packages without an inventory here
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"critical_neurons {release}"
html_static_path = ["static"]
html_css_files = ["wide-tables.css"]
html_theme_options = {"navigation_with_keys": True}

CODE_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
ASTERISK = re.compile(r"\*(?=\S)")  # not that of a list


def _mark_up(line: str) -> str:
    """Code spans of Markdown as literals; those that name something public as links."""
    parts = CODE_SPAN.split(line)  # text and code in turns
    for at, part in enumerate(parts):
        name = part.removeprefix("cn.").removesuffix("(...)")
        if at % 2 == 0:
            parts[at] = ASTERISK.sub(r"\\*", part)
        elif name in cn.__all__:
            parts[at] = f":py:obj:`{part} <critical_neurons.{name}>`"
        else:
            parts[at] = f"``{part}``"
    return "".join(parts)


def _read_docstring(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    in_example = False
    for at, line in enumerate(lines):
        in_example = line.lstrip().startswith(">>>") or (
            in_example and bool(line.strip())
        )
        if not in_example:
            lines[at] = _mark_up(line)


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", _read_docstring)
