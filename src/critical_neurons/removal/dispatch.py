"""Dispatch: a watch over the calls that torch makes below its modules."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """As torch's own, but for its compiler, which nobody needs here: importing it takes seconds."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
