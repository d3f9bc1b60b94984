"""Builder: a `torch.fx.GraphModule` from successive calls of torch.

Every call is also run on meta tensors, which have shapes but no memory: converters can ask for shapes, errors appear
at the operator that causes them, and no file can make us allocate too much memory.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import map_aggregate

from critical_neurons.errors import ConversionError

MOST_CONSTANTS, MOST_ELEMENTS = 2**28, 2**32
"""Limits on the numbers in a constant (1 GiB of float32), and in a value of the example, which needs no memory."""

EXAMPLE = "example"
"""Key of a node's example value: a meta tensor, a number, or several tensors."""

Size: TypeAlias = "int | fx.Node"
"""A number, or a node if it is only known when the network runs."""


class Builder:
    """`call` returns a constant if all arguments are constants, and a node of the graph otherwise."""

    def __init__(self) -> None:
        self.root = nn.Module()
        self.graph = fx.Graph()
        self.rows = 0
        """Batch size of the example."""
        self._paths: set[str] = set()
        self._folders: set[str] = set()

    def start(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> fx.Node:
        self.rows = shape[0]
        node = self.graph.placeholder(_clean(name))
        return self._keep(node, torch.empty(shape, dtype=dtype, device="meta"))

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = (args, kwargs)
        seen: list[fx.Node] = []
        fx.node.map_arg(given, seen.append)
        shapes, named = map_aggregate(given, _example)
        with torch.no_grad(), torch.device("meta"):
            found = function(*shapes, **named)
        _check_size(found, MOST_ELEMENTS if seen else MOST_CONSTANTS)
        if not seen:
            with torch.no_grad():
                return function(*args, **kwargs)
        arguments, keywords = map_aggregate(given, lambda each: self._argument(name, each))
        return self._keep(
            self.graph.create_node("call_function", function, arguments, keywords, _clean(name)),
            found,
        )

    def call_module(self, name: str, module: nn.Module, value: fx.Node) -> fx.Node:
        """Add the module under a similar, unused name, and call it."""
        module.eval()
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        shapes = {key: tensor.to("meta") for key, tensor in tensors.items()}
        with torch.no_grad():
            found = functional_call(module, shapes, (_example(value),))
        _check_size(found, MOST_ELEMENTS)
        path = self._place(name)
        folder, _, last = path.rpartition(".")
        self._find_folder(folder).add_module(last, module)
        return self._keep(self.graph.create_node("call_module", path, (value,), {}, _clean(path)), found)

    def take_size(self, value: fx.Node, axis: int) -> fx.Node:
        """The size of a value along an axis, as known when the network runs."""
        return self._keep(self.graph.call_method("size", (value, axis)), _example(value).shape[axis])

    def finish(self, outputs: tuple[Any, ...]) -> fx.GraphModule:
        results = tuple(map_aggregate(outputs, lambda each: self._argument("output", each)))
        self.graph.output(results[0] if len(results) == 1 else results)
        for node in self.graph.nodes:
            node.meta.pop(EXAMPLE, None)
        draft = fx.GraphModule(self.root, self.graph)
        draft.graph.eliminate_dead_code()
        return fx.GraphModule(draft, draft.graph, class_name="OnnxNetwork").eval()  # without unused modules

    def _argument(self, name: str, value: Any) -> Any:
        """Constants become buffers, which are moved, converted and saved with the module."""
        if not isinstance(value, Tensor):
            return value
        path = self._place(f"{name}.constant")
        folder, _, last = path.rpartition(".")
        self._find_folder(folder).register_buffer(last, value.clone())
        return self.graph.get_attr(path)

    def _keep(self, node: fx.Node, example: Any) -> fx.Node:
        node.meta[EXAMPLE] = example
        return node

    def _find_folder(self, path: str) -> nn.Module:
        folder = self.root
        for part in path.split(".") if path else ():
            if part not in folder._modules:
                folder.add_module(part, nn.Module())
            folder = folder.get_submodule(part)
        return folder

    def _place(self, name: str) -> str:
        """An unused path similar to the name, neither inside another path nor containing one, that is valid in
        code."""
        parts = [_clean(part) for part in re.split(r"[./]", name) if part.strip("_")] or ["node"]
        path, number = ".".join(parts), 0
        while path in self._paths | self._folders or any(each in self._paths for each in _above(path)):
            number += 1
            path = f"{'_'.join(parts)}_{number}"
        self._paths.add(path)
        self._folders.update(_above(path))
        return path


def find_shape(value: Any) -> tuple[int, ...]:
    """The shape of a constant, or of a node's example value."""
    return tuple(_example(value).shape)


def find_number(size: Size) -> int:
    """The size in the example."""
    return int(_example(size))


def _example(value: Any) -> Any:
    if isinstance(value, fx.Node):
        return value.meta[EXAMPLE]
    return value.to("meta") if isinstance(value, Tensor) else value


def _check_size(found: Any, most: int) -> None:
    for value in found if isinstance(found, tuple | list) else (found,):
        if isinstance(value, Tensor) and value.numel() > most:
            raise ConversionError(f"gives a value of shape {tuple(value.shape)}, more than {most:,} numbers")


def _clean(name: str) -> str:
    """One part of a path: letters, digits and underscores, no keyword and no attribute that modules have."""
    part = re.sub(r"[^0-9A-Za-z_]+", "_", name).strip("_") or "node"
    return f"{part}_" if keyword.iskeyword(part) or hasattr(fx.GraphModule, part) or part == "training" else part


def _above(path: str) -> list[str]:
    parts = path.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]
