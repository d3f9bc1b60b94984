"""Labelled run: run a model on one example, with a label for every element that it computes.

Nothing is traced, so control flow, closures, several inputs and any outputs work. Below autograd torch has few kinds
of calls, and a few rules (`rules`) say what each does to labels. Units that reach a call without a rule must stay,
with that reason.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from critical_neurons.core.deadline import check_time
from critical_neurons.removal.dispatch import DispatchMode
from critical_neurons.removal.rows import find_tensors
from critical_neurons.structure.flow import Flow
from critical_neurons.structure.labels import FILL, NONE, Labels
from critical_neurons.structure.parameters import Parameters
from critical_neurons.structure.records import Cost, LeftAlone, Multiplication
from critical_neurons.structure.rules import apply_rule, list_outputs, list_parts, name_call
from critical_neurons.structure.tags import Tag, blank, compact, list_steps
from critical_neurons.structure.user_code import find_running_line, list_names

OPAQUE: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.RNNCellBase)
"""Modules whose weights cannot be sliced along one axis: everything they read stays."""

MADE_OF_A_SHAPE = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "new_")
    for name in ("zeros", "ones", "full", "empty", "empty_strided", "rand", "randn", "scalar_tensor")
)
COPIES = frozenset({"_to_copy", "clone"})
"""Calls that return the same values in another type or layout."""

NOTHING: Mapping[str, str] = MappingProxyType({})

OUTPUT = "it gives the network's output"


class LabelledRun(DispatchMode):  # type: ignore[no-untyped-call]
    """`model` is a copy, which is run with hooks. `follows`: whether tensors made from a shape are assumed to shrink
    with what they are combined with. `split`: modules whose attention cannot lose whole heads, and why."""

    def __init__(self, model: nn.Module, *, follows: bool = True, split: Mapping[str, str] = NOTHING) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.labels, self.flow = model, Labels(), Flow()
        self.parameters = Parameters(model, self.labels)
        self.multiplications: list[Multiplication] = []
        self.costs: list[Cost] = []
        self.left_alone: list[LeftAlone] = []
        self.sizes: dict[str, Tensor] = {}
        self.used_sizes: list[tuple[str, Tensor, int]] = []
        """Integer attributes of modules, the labels of a tensor with such a size, and the axis."""
        self.heads: dict[str, list[Tensor]] = {}
        """By module: labels shared by all channels of an attention head."""
        self._owed = WeakTensorKeyDictionary()
        """Values that would be wrong after a removal, with the labels that must stay if such a value is used."""
        self.blocks: list[Tensor] = []
        """(blocks, size): labels of which every block must lose equally many."""
        self.rows, self.draws = 1, False
        """The size of the batch axis, and whether the model draws random numbers."""
        self.follows, self.filled, self._split = follows, False, split
        self._tags = WeakTensorKeyDictionary()
        self._stack: list[tuple[str, nn.Module]] = []
        self._opaque = 0
        self._entry: CodeType | None = None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], rows: int) -> Any:
        """The model's outputs; `rows` is the size of the batch axis."""
        self.rows, self._entry = rows, sys._getframe().f_code
        for values in _list_tensors((args, kwargs)):
            self._tags[values] = blank(values.ndim)
        with torch.no_grad(), self._watch_modules(), self:
            outputs = self.model(*args, **kwargs)
        self.parameters.link_computed()
        for values in find_tensors(outputs):
            self.labels.keep(self.tag(values).labels, OUTPUT, foremost=True)
            self.flow.end(values)
        return outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_time()
        kwargs = kwargs or {}
        self.draws = self.draws or torch.Tag.nondeterministic_seeded in func.tags
        reshaped = args[0].detach() if torch.Tag.inplace_view in func.tags else None  # keeps the old shape
        outputs = func(*args, **kwargs)
        if self._opaque:
            return outputs
        if reshaped is None:
            self._follow(func, args, kwargs, outputs)
        else:
            self._reshape(func, args, kwargs, reshaped)
        return outputs

    def tag(self, values: Tensor) -> Tag:
        """The tag of a value, of a view of a parameter, or of an unknown tensor."""
        if len(self._owed) and (owed := self._owed.pop(values, None)) is not None:  # type: ignore[no-untyped-call]
            self.labels.keep(*owed)
        found = self._look_up(values)
        if found is not None:
            return found
        if not self.parameters.owns(values):
            return blank(values.ndim)
        return Tag(compact(self.parameters.tag(values).labels), constant=True)

    def _look_up(self, values: Tensor) -> Tag | None:
        found: Tag | None = self._tags.get(values)  # type: ignore[no-untyped-call]
        return found

    def is_value(self, values: Any) -> bool:
        """Whether it depends on the inputs."""
        return isinstance(values, Tensor) and (tag := self._look_up(values)) is not None and not tag.constant

    def fill(self, ndim: int) -> Tag:
        """The tag of a tensor made from a shape."""
        self.filled = True
        return blank(ndim, label=FILL if self.follows else NONE)

    def keep(self, labels: Tensor, what: str) -> None:
        """Labels that must stay because of the present call."""
        if bool((labels >= 0).any()):
            self.labels.keep(labels, f"{what}{self._describe_place()}")

    def keep_if_used(self, labels: Tensor, what: str, values: Tensor) -> Tag:
        """Labels that must stay if any call reads these values, or the model returns them."""
        self._owed[values] = (labels, f"{what}{self._describe_place()}")
        return blank(values.ndim)

    @property
    def module(self) -> tuple[str, nn.Module]:
        """The innermost running module."""
        return self._stack[-1] if self._stack else ("", self.model)

    @property
    def whole_heads(self) -> bool:
        """Whether the running attention may lose whole heads, rather than channels of all heads."""
        return not self.why_split

    @property
    def why_split(self) -> str:
        """Why the running attention cannot lose whole heads."""
        return next((self._split[name] for name, _ in self._stack or [self.module] if name in self._split), "")

    def note_heads(self, labels: Tensor) -> None:
        self.heads.setdefault(self.module[0], []).append(labels)

    def names_used(self) -> set[str]:
        """Names in the code of the running module's forward and of functions it calls."""
        return list_names(self._entry)

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        tensors, given = list_parts((*args, *kwargs.values())), list_parts(list_outputs(outputs))
        name, writes = name_call(func), func._schema.is_mutable
        if name in MADE_OF_A_SHAPE and not writes:
            for values in given:
                self._tags[values] = self.fill(values.ndim)
            return
        if all(self._look_up(values) is None for values in tensors):
            owned = [values for values in tensors if self.parameters.owns(values)]
            if not owned:
                return  # made without known tensors
            if name in COPIES and len(tensors) == 1 and not self.parameters.owns(outputs):
                self.parameters.add_copy(outputs, tensors[0])
                return
            if not writes and all(self.parameters.owns(values) for values in given):
                return  # a view of a parameter: known without a tag
        known = len(self.multiplications)
        tags = apply_rule(self, func, args, kwargs, outputs)
        layers = [each.name for each in self.multiplications[known:] if each.kernel]
        self.flow.follow(tensors, given, layers, writes=writes)
        for values, tag in zip(list_outputs(outputs), tags, strict=False):
            if isinstance(values, Tensor) and tag is not None:
                if writes:
                    self._write(values, tag)
                else:
                    self._tags[values] = tag

    def _write(self, values: Tensor, tag: Tag) -> None:
        """Update the tags of all tensors that share the memory of one written in place."""
        before = self.tag(values).labels
        self.parameters.forget(values)
        if values._is_view() and values._base is not None and self._look_up(values._base) is None:
            self._tags[values._base] = self.tag(values._base)
        self._tags[values] = tag
        if torch.equal(before, tag.labels):
            return
        storage = values.untyped_storage()
        for other, known in list(self._tags.items()):  # type: ignore[no-untyped-call]
            if other is not values and other.untyped_storage().data_ptr() == storage.data_ptr() and other.numel():
                memory = torch.full((storage.nbytes() // values.element_size(),), float(NONE), dtype=torch.float64)
                view = memory.as_strided(other.size(), other.stride(), other.storage_offset())
                view.copy_(known.labels)
                memory.as_strided(values.size(), values.stride(), values.storage_offset()).copy_(tag.labels)
                self._tags[other] = Tag(compact(view), active=known.active, constant=known.constant and tag.constant)

    def _reshape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Tensor) -> None:
        """A call that changes the shape of a tensor in place, such as `unsqueeze_`."""
        values, tag, name = args[0], self._look_up(args[0]), name_call(func)
        if tag is None or list_steps(before) == list_steps(values):
            return  # as pools to one position do in channels-last layout: only axes of size 1 get other strides
        try:
            if name == "as_strided":
                raise RuntimeError("labels lie in memory in another way")
            labels = func(tag.labels.expand(before.shape), *args[1:], **kwargs)
        except RuntimeError:
            self.keep(tag.labels, f"{name} changes its shape in place")
            labels = blank(values.ndim).labels
        self._tags[values] = Tag(compact(labels), None, tag.active, tag.constant)

    def _describe_place(self) -> str:
        """The running module and the line of the user's code."""
        name, module = self.module
        where = f" in {name} ({type(module).__name__})" if name else ""
        line = find_running_line(self._entry)
        return f"{where}, {line}" if line else where

    @contextmanager
    def _watch_modules(self) -> Iterator[None]:
        handles = []
        for name, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(name), with_kwargs=True, prepend=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
        for tensor, (name, each) in self.parameters.computed.items():
            module = self.model.get_submodule(name)
            if each.hook is None:
                lists = module.get_submodule("parametrizations.weight")
                handles.append(lists.register_forward_pre_hook(self._hide, prepend=True))
                handles.append(lists.register_forward_hook(self._show(tensor)))
            else:
                handles.append(module.register_forward_pre_hook(self._hide, prepend=True))
                handles.append(module.register_forward_pre_hook(self._show(tensor)))
        fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)  # a fused call hides its steps
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._stack.append((name, module))
            if isinstance(module, OPAQUE) and not self._opaque:
                reason = f"{type(module).__name__} is left as it is"
                self.left_alone.append(
                    LeftAlone(name, type(module).__name__, int(vars(module)["hidden_size"]), reason)
                )
                given = _list_tensors((args, kwargs))
                for values in given:
                    self.keep(self.tag(values).labels, f"it feeds {type(module).__name__}, left as it is,")
                self.flow.follow(given, (), [name])
                self.costs.append(Cost(name, _count_recurrent_macs(module, given) // self.rows, ()))
            self._opaque += isinstance(module, OPAQUE)

        return note

    def _hide(self, module: nn.Module, args: Any) -> None:
        """Ignore calls while a parametrised weight is computed."""
        self._opaque += 1

    def _show(self, tensor: str) -> Callable[..., None]:
        """Then treat the computed weight like the tensor it is computed from."""

        def note(module: nn.Module, args: Any, outputs: Any = None) -> None:
            self._opaque -= 1
            weight = vars(module)["weight"] if outputs is None else outputs
            self.parameters.add_copy(weight, self.parameters.named[tensor])

        return note

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        name, _ = self._stack.pop()
        if isinstance(module, OPAQUE):
            self._opaque -= 1
            self.flow.follow((), _list_tensors(outputs), [name])
            for values in _list_tensors(outputs):
                self._tags[values] = blank(values.ndim)


def _count_recurrent_macs(module: nn.Module, given: list[Tensor]) -> int:
    """Multiply-adds of a recurrent module: every weight once per step of every sequence, its first input."""
    steps = given[0].numel() // given[0].shape[-1] if given else 0
    return steps * sum(values.numel() for values in module.parameters() if values.ndim == 2)


def _list_tensors(nested: Any) -> list[Tensor]:
    return [values for values in tree_leaves(nested) if isinstance(values, Tensor)]
