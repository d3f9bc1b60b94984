"""Dispatch: the base class of hooks on torch's operators."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`TorchDispatchMode` without support for torch's compiler, whose import takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
