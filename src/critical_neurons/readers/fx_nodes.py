"""Fx nodes: the nodes of a traced graph, their names, places and arguments."""

from __future__ import annotations

import torch
from torch import fx

DIVISIONS = (torch.split, torch.chunk, torch.tensor_split, torch.unbind, "split", "chunk", "tensor_split", "unbind")
"""Calls that give several tensors, each a part of what they read."""


def name_call(n: fx.Node) -> str:
    """The module's name; of a function or method, the name torch.fx gave the call."""
    return str(n.target) if n.op == "call_module" else n.name


def find_owners(n: fx.Node) -> list[str]:
    """The modules that a call lies in, from the outside in, and the module it is a call of."""
    return [path for path, _ in n.meta.get("nn_module_stack", {}).values()]


def list_arguments(n: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, as often as they stand there: x + x reads x twice."""
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
    """All nodes that depend on one."""
    found: set[fx.Node] = set()
    left = [n]
    while left:
        fresh = [user for user in left.pop().users if user not in found]
        found.update(fresh)
        left += fresh
    return found


def find_sources(n: fx.Node) -> set[fx.Node]:
    """All nodes that one depends on."""
    found: set[fx.Node] = set()
    left = [n]
    while left:
        fresh = [source for source in left.pop().all_input_nodes if source not in found]
        found.update(fresh)
        left += fresh
    return found
