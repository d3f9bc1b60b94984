"""Fx nodes: names, owners, arguments and dependencies of the nodes of a traced graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import fx

DIVISIONS = (torch.split, torch.chunk, torch.tensor_split, torch.unbind, "split", "chunk", "tensor_split", "unbind")
"""Calls that return several tensors, each a part of the input."""


def name_call(n: fx.Node) -> str:
    """The module's name; for a function or method, the name that torch.fx gave the call."""
    return str(n.target) if n.op == "call_module" else n.name


def find_owners(n: fx.Node) -> list[str]:
    """The modules that contain a call, from the outside in, and the called module itself."""
    return [path for path, _ in n.meta.get("nn_module_stack", {}).values()]


def list_arguments(n: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, with repetitions: x + x reads x twice."""
    found: list[fx.Node] = []
    fx.node.map_arg((n.args, n.kwargs), found.append)
    return found


def find_literal_sizes(n: fx.Node) -> tuple[int, ...]:
    """Sizes other than the batch written as numbers in a view or reshape."""
    if n.target not in ("view", "reshape", torch.reshape):
        return ()
    sizes = n.args[1] if len(n.args) == 2 and isinstance(n.args[1], tuple | list) else n.args[1:]
    return tuple(size for size in tuple(sizes)[1:] if isinstance(size, int) and size > 1)


def find_dependents(n: fx.Node) -> set[fx.Node]:
    """All nodes that depend on `n`."""
    return _follow(n, lambda node: node.users)


def find_sources(n: fx.Node) -> set[fx.Node]:
    """All nodes that `n` depends on."""
    return _follow(n, lambda node: node.all_input_nodes)


def _follow(n: fx.Node, step: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    left = [n]
    while left:
        fresh = [node for node in step(left.pop()) if node not in found]
        found.update(fresh)
        left += fresh
    return found
