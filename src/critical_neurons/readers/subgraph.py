"""Subgraph: the calls of a traced model inside a span, and checks at the two ends of the span while it runs."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from critical_neurons.core.span import Span
from critical_neurons.errors import InvalidSettingError
from critical_neurons.readers.fx_nodes import find_dependents, find_owners, find_sources, list_arguments, name_call

PLAIN = (int, torch.Size, torch.dtype, torch.device)
"""What calls may return besides tensors: sizes and types, the same for every data point."""

NAMES_SHOWN = 8
"""Most names that a message suggests."""


@dataclass(frozen=True, eq=False)
class Cut:
    """`entry` is the input of the span's first call, `exit` the output of its last (None: the model's output);
    `inside` are the calls in between, `behind` those that depend on `exit`, `carried` all that depend on the model's
    input or its sizes. `opaque` are the modules that torch.fx could not trace, and why.
    """

    span: Span
    entry: fx.Node
    exit: fx.Node | None
    inside: frozenset[fx.Node]
    behind: frozenset[fx.Node]
    carried: frozenset[fx.Node]
    opaque: Mapping[str, str]


def cut_out(graph: fx.Graph, span: Span, opaque: Mapping[str, str], modules: Collection[str]) -> Cut:
    """`modules` are the names of all modules of the model."""
    (entry,) = (node for node in graph.nodes if node.op == "placeholder" and not node.args)
    carried = {entry, *find_dependents(entry)}
    first = _find_calls(graph, "start", span.start, modules)[0] if span.start else None
    last = _find_calls(graph, "stop", span.stop, modules)[-1] if span.stop else None
    if first is not None:
        read = [node for node in list_arguments(first) if node in carried]
        if not read:
            raise InvalidSettingError(f"start: {name_call(first)} reads nothing that comes from the input.")
        entry = read[0]
    inside = find_dependents(entry)
    if last is not None:
        inside &= {last, *find_sources(last)}
        if last not in inside or (first is not None and first not in inside):
            raise InvalidSettingError(f"stop: {span.stop} does not follow {span.start or 'the input'}.")
    end = last or first
    if end is not None and not any(node.op == "output" for node in find_dependents(end)):
        raise InvalidSettingError(f"the model's output does not depend on {span.stop or span.start}.")
    behind = find_dependents(last) if last else ()
    return Cut(span, entry, last, frozenset(inside), frozenset(behind), frozenset(carried), opaque)


def _find_calls(graph: fx.Graph, end: str, name: str, modules: Collection[str]) -> list[fx.Node]:
    """The calls of a module, or of the modules and functions in it; or the one call of that name."""
    calls = [node for node in graph.nodes if node.op.startswith("call_")]
    found = [node for node in calls if name in find_owners(node)] or [node for node in calls if node.name == name]
    if found:
        return found
    known = list(dict.fromkeys(owner for node in calls for owner in [*find_owners(node), name_call(node)]))
    near = difflib.get_close_matches(name, known, n=NAMES_SHOWN, cutoff=0.4) or known[:NAMES_SHOWN]
    what = "is not called by itself in the forward" if name in modules else "is no module or call of the model"
    raise InvalidSettingError(f"{end}: {name!r} {what}. Names like it that are: {', '.join(near)}.")


@dataclass
class Border:
    """Tracks which values depend on the input while the calls run, and refuses paths around an end of the span."""

    cut: Cut
    batch_size: int = 0
    _carrying: set[fx.Node] = field(default_factory=set)

    def check(self, n: fx.Node, result: Any) -> None:
        read = [node for node in n.all_input_nodes if node in self._carrying]
        cut, span = self.cut, self.cut.span
        if n in cut.inside:
            past = [node for node in read if node is not cut.entry and node not in cut.inside]
            end, origin = "start", f"what {span.start} reads"
        elif n in cut.behind:
            past = [node for node in read if node is not cut.exit and node not in cut.behind]
            end, origin = "stop", f"what {span.stop} gives"
        else:
            past, end, origin = [], "", ""
        if past:
            raise InvalidSettingError(
                f"{end}: {name_call(n)} reads {name_call(past[0])}, which does not come from {origin}. A span is a "
                "single path, with no other way into it, out of it or around it."
            )
        if n.op == "placeholder" and not n.args:
            self.batch_size = len(result)
            self._carrying.add(n)
        elif read and not isinstance(result, PLAIN):
            self._carrying.add(n)
