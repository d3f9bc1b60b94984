"""Labelled run: a model on one example, with a label beside every element that it computes.

No tracing: control flow, closures, several inputs and any outputs just run. Below autograd torch has few kinds of
calls, and a handful of rules (`rules`) says what each does to labels. What no rule covers keeps every unit that
reaches it, and says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from critical_neurons.removal import attention
from critical_neurons.removal.dispatch import DispatchMode
from critical_neurons.removal.rows import find_tensors
from critical_neurons.structure.labels import FILL, NONE, Labels
from critical_neurons.structure.parameters import Parameters
from critical_neurons.structure.records import Cost, LeftAlone, Multiplication
from critical_neurons.structure.rules import apply_rule, list_outputs, name_call
from critical_neurons.structure.tags import Tag, blank, compact

OPAQUE: tuple[type[nn.Module], ...] = (nn.RNNBase, nn.RNNCellBase)
"""Modules whose weights belong together in ways that no slice of one axis takes apart: all around them stays."""

MADE_OF_A_SHAPE = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "new_")
    for name in ("zeros", "ones", "full", "empty", "empty_strided", "rand", "randn", "scalar_tensor")
)
COPIES = frozenset({"_to_copy", "clone"})
"""Calls that give the same numbers in another type or layout."""

NOTHING: Mapping[str, str] = MappingProxyType({})

OUTPUT = "it gives the network's output"
OWN = os.path.dirname(os.path.dirname(__file__))
TORCH = os.path.dirname(torch.__file__)


class LabelledRun(DispatchMode):  # type: ignore[no-untyped-call]
    """`model` is a copy: it is run, and its hooks are used. `follows`: whether what a forward makes out of a shape is
    taken to shrink along with what it meets. `split`: modules whose attention cannot lose whole heads, and why."""

    def __init__(self, model: nn.Module, *, follows: bool = True, split: Mapping[str, str] = NOTHING) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.model, self.labels = model, Labels()
        self.parameters = Parameters(model, self.labels)
        self.multiplications: list[Multiplication] = []
        self.costs: list[Cost] = []
        self.left_alone: list[LeftAlone] = []
        self.sizes: dict[str, Tensor] = {}
        self.used_sizes: list[tuple[str, Tensor, int]] = []
        """Numbers that modules keep, the labels of what is given such a size, and along which axis."""
        self.heads: dict[str, list[Tensor]] = {}
        """By module: labels that are one for all channels of a head of an attention."""
        self._owed = WeakTensorKeyDictionary()
        """Values that are no longer right once units have gone: these stay if such a value is used."""
        self.blocks: list[Tensor] = []
        """(blocks, size): labels of which every block must lose as many."""
        self.rows = 1
        self.follows, self.filled = follows, False
        self._split = split
        self._tags = WeakTensorKeyDictionary()
        self._stack: list[tuple[str, nn.Module]] = []
        self._opaque = 0
        self._entry: CodeType | None = None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any], rows: int) -> Any:
        """What the model gives; `rows` is the size of the batch axis."""
        self.rows, self._entry = rows, sys._getframe().f_code
        for values in tree_leaves((args, kwargs)):
            if isinstance(values, Tensor):
                self._tags[values] = blank(values.ndim)
        with torch.no_grad(), self._watch_modules(), self:
            outputs = self.model(*args, **kwargs)
        self.parameters.link_computed()
        for values in find_tensors(outputs):
            self.labels.keep(self.tag(values).labels, OUTPUT, foremost=True)
        return outputs

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        reshaped = args[0].detach() if torch.Tag.inplace_view in func.tags else None  # keeps the shape it had
        outputs = func(*args, **kwargs)
        if self._opaque:
            return outputs
        if reshaped is None:
            self._follow(func, args, kwargs, outputs)
        else:
            self._reshape(func, args, kwargs, reshaped)
        return outputs

    def tag(self, values: Tensor) -> Tag:
        """The tag of a value, of a view of a parameter, or of what came from nowhere."""
        owed = self._owed.pop(values, None)  # type: ignore[no-untyped-call]
        if owed is not None:
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
        """Of what is made out of a shape."""
        self.filled = True
        return blank(ndim, label=FILL if self.follows else NONE)

    def keep(self, labels: Tensor, what: str) -> None:
        """They must stay, for what the present call does."""
        if bool((labels >= 0).any()):
            self.labels.keep(labels, f"{what}{self._describe_place()}")

    def keep_if_used(self, labels: Tensor, what: str, values: Tensor) -> Tag:
        """They must stay if any call reads these values, or the model gives them."""
        self._owed[values] = (labels, f"{what}{self._describe_place()}")
        return blank(values.ndim)

    @property
    def module(self) -> tuple[str, nn.Module]:
        """The innermost module that is running."""
        return self._stack[-1] if self._stack else ("", self.model)

    @property
    def whole_heads(self) -> bool:
        """Whether the attention that is running may lose heads, not channels of all of them."""
        return not self.why_split

    @property
    def why_split(self) -> str:
        """Why it cannot."""
        return next((self._split[name] for name, _ in self._stack or [self.module] if name in self._split), "")

    def note_heads(self, labels: Tensor) -> None:
        self.heads.setdefault(self.module[0], []).append(labels)

    def names_used(self) -> set[str]:
        """Names in the code of the running module's forward, and of what it calls."""
        names: set[str] = set()
        frame = sys._getframe()
        while frame is not None and frame.f_code.co_name != "_call_impl" and frame.f_code is not self._entry:
            if not frame.f_code.co_filename.startswith(OWN) or frame.f_code.co_filename == attention.__file__:
                names.update(frame.f_code.co_names)
            if frame.f_back is None:
                break
            frame = frame.f_back
        return names

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        tensors = [values for values in tree_leaves((args, kwargs)) if isinstance(values, Tensor)]
        given = [values for values in tree_leaves(outputs) if isinstance(values, Tensor)]
        name, writes = name_call(func), func._schema.is_mutable
        if name in MADE_OF_A_SHAPE and not writes:
            for values in given:
                self._tags[values] = self.fill(values.ndim)
            return
        if all(self._look_up(values) is None for values in tensors):
            owned = [values for values in tensors if self.parameters.owns(values)]
            if not owned:
                return  # out of nothing
            if name in COPIES and len(tensors) == 1 and not self.parameters.owns(outputs):
                self.parameters.add_copy(outputs, tensors[0])
                return
            if not writes and all(self.parameters.owns(values) for values in given):
                return  # a view of a parameter: known without a tag
        tags = apply_rule(self, func, args, kwargs, outputs)
        for values, tag in zip(list_outputs(outputs), tags, strict=False):
            if isinstance(values, Tensor) and tag is not None:
                if writes:
                    self._write(values, tag)
                else:
                    self._tags[values] = tag

    def _write(self, values: Tensor, tag: Tag) -> None:
        """What is written to in place changes for all that share its memory."""
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
        """A call that changes the shape of a tensor itself, as `unsqueeze_`."""
        values, tag, name = args[0], self._look_up(args[0]), name_call(func)
        if tag is None or _list_steps(before) == _list_steps(values):
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
        """In which module, and on which line of the user's own code."""
        name, module = self.module
        where = f" in {name} ({type(module).__name__})" if name else ""
        frame = sys._getframe()
        while frame is not None and frame.f_code is not self._entry:
            path = frame.f_code.co_filename
            if not path.startswith((OWN, TORCH)) and not path.startswith("<"):
                return f"{where}, {os.path.basename(path)}:{frame.f_lineno}"
            if frame.f_back is None:
                break
            frame = frame.f_back
        return where

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
        torch.backends.mha.set_fastpath_enabled(False)  # a fused call hides what happens inside
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
                given = [values for values in tree_leaves((args, kwargs)) if isinstance(values, Tensor)]
                for values in given:
                    self.keep(self.tag(values).labels, f"it feeds {type(module).__name__}, left as it is,")
                self.costs.append(Cost(name, _count_recurrent_macs(module, given) // self.rows, ()))
            self._opaque += isinstance(module, OPAQUE)

        return note

    def _hide(self, module: nn.Module, args: Any) -> None:
        """What computes a weight is about to run."""
        self._opaque += 1

    def _show(self, tensor: str) -> Callable[..., None]:
        """The weight is there: as good as the tensor it is computed from."""

        def note(module: nn.Module, args: Any, outputs: Any = None) -> None:
            self._opaque -= 1
            weight = vars(module)["weight"] if outputs is None else outputs
            self.parameters.add_copy(weight, self.parameters.named[tensor])

        return note

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        self._stack.pop()
        if isinstance(module, OPAQUE):
            self._opaque -= 1
            for values in tree_leaves(outputs):
                if isinstance(values, Tensor):
                    self._tags[values] = blank(values.ndim)


def _count_recurrent_macs(module: nn.Module, given: list[Tensor]) -> int:
    """Of a recurrent module: every weight once for every step of every sequence, which it is given first."""
    steps = given[0].numel() // given[0].shape[-1] if given else 0
    return steps * sum(values.numel() for values in module.parameters() if values.ndim == 2)


def _list_steps(values: Tensor) -> list[tuple[int, int]]:
    """Where its elements lie in memory: size and stride of every axis; of one of size 1 the stride says nothing."""
    steps = [(size, stride if size > 1 else 0) for size, stride in zip(values.shape, values.stride(), strict=True)]
    return [(int(values.storage_offset()), 0), *steps]
