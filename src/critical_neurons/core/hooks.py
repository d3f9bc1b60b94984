"""Hooks: implementations of methods, such as plotting, that need packages `core` does not import.

`critical_neurons/__init__.py` sets them before anything of `core` can be imported; core knows only their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

Hook: TypeAlias = Literal["plot", "render_html", "as_masks", "as_torch_pruning"]

_FINDERS: dict[str, Callable[[], Callable[..., Any]]] = {}


def set_hook(name: Hook, find: Callable[[], Callable[..., Any]]) -> None:
    """`find` returns the function. It is called with the hook, so that setting a hook imports nothing."""
    _FINDERS[name] = find


def call_hook(name: Hook, *arguments: Any, **options: Any) -> Any:
    return _FINDERS[name]()(*arguments, **options)


class Shown:
    """Data with an HTML view in notebooks."""

    def _repr_html_(self) -> str:
        html: str = call_hook("render_html", self)
        return html
