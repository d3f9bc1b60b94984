"""Passes: forward passes that pause where modules are called.

Each pass is a coroutine made of a thread, since a model's forward is an ordinary function. `advance` lets the thread
run until the pass pauses or ends, and waits for it, so that only one thread runs at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Pause:
    """Where a pass waits: the module and its input, and its output if the pass waits behind the module."""

    module: str
    read: Tensor
    given: Tensor | None = None


class ForwardPass:
    """`run` in its own thread, which pauses at the modules of `pause_at` except those in `passed`."""

    def __init__(self, run: Callable[[], Any], passed: Container[str]) -> None:
        self.at: Pause | None = None
        self.done = False
        self._run: Callable[[], Any] | None = run
        self._passed, self._settings = passed, _Settings.here()
        self._error: BaseException | None = None
        self._closed = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, name="forward pass", daemon=True)

    def advance(self) -> None:
        """Run to the next pause or the end, unless the module it waits at is not in `passed` yet.

        Exceptions of the pass are raised here.
        """
        if self.done or (self.at is not None and self.at.module not in self._passed):
            return
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def run_on(self) -> None:
        """Run to the end, or to a pause at a module that is not in `passed`."""
        while not self.done and (self.at is None or self.at.module in self._passed):
            self.advance()

    def cancel(self) -> None:
        """End the pass at its pause, or at the next one if an interrupt left it running."""
        self._closed = True
        self._turn.release()

    def join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def reach(self, module: str, read: Tensor, given: Tensor | None) -> None:
        """Called in the thread of the pass."""
        if self._closed:
            raise _Closed
        if module in self._passed:
            return
        self.at = Pause(module, read, given)
        self._back.release()
        self._turn.acquire()
        self.at = None
        if self._closed:
            raise _Closed

    def _work(self) -> None:
        _here.forward = self
        try:
            assert self._run is not None
            with self._settings.enter():
                self._run()
        except _Closed:
            pass
        except BaseException as error:  # raised again in `advance`
            self._error = error
        finally:
            self.done, self._run = True, None
            self._back.release()


def close_all(passes: Iterable[ForwardPass]) -> None:
    """Cancel all before waiting for any, so that even after another interrupt none runs on for long."""
    passes = list(passes)
    for forward in passes:
        forward.cancel()
    for forward in passes:
        forward.join()


@contextmanager
def pause_at(modules: Mapping[str, nn.Module], *, behind: bool) -> Iterator[None]:
    """While the context lasts, passes pause before these modules, or behind them."""

    def watch(name: str) -> Callable[..., None]:
        def reach(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], given: Any = None) -> None:
            forward: ForwardPass | None = getattr(_here, "forward", None)
            if forward is not None:  # None in threads that the model itself started
                forward.reach(name, find_input(args, kwargs), given)

        return reach

    with ExitStack() as stack:
        for name, module in modules.items():
            if behind:
                hook = module.register_forward_hook(watch(name), prepend=True, with_kwargs=True)
            else:
                hook = module.register_forward_pre_hook(watch(name), with_kwargs=True)
            stack.enter_context(hook)
        yield


def find_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The tensor that a module with one input is called with."""
    values: Tensor = args[0] if args else kwargs["input"]
    return values


_here = threading.local()
"""`forward`: the pass that runs in this thread."""


class _Closed(BaseException):
    """Ends a cancelled pass. A BaseException, so that a model's `except Exception` does not stop it."""


def _uses_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class _Settings:
    """torch's thread-local settings, which a new thread does not inherit."""

    device: torch.device
    autocast: tuple[tuple[str, torch.dtype, bool], ...]
    cuda: int | None

    @classmethod
    def here(cls) -> _Settings:
        device = torch.get_default_device()
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        autocast = tuple((kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds)
        return cls(device, autocast, torch.cuda.current_device() if _uses_cuda() else None)

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Apply the settings, without gradients."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if self.cuda is not None:
                stack.enter_context(torch.cuda.device(self.cuda))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            yield
