"""Memory: how the process of the command line tool allocates it."""

from __future__ import annotations

import ctypes
from contextlib import suppress

M_ARENA_MAX = -8
"""The option's number in glibc's malloc.h."""


def use_one_arena() -> None:
    """Let all threads allocate from one arena, before the first thread starts; does nothing without glibc.

    Refitting runs every forward pass in its own thread. With an arena for each, glibc returns freed memory to the
    system and fetches it again page by page, which takes a third of their time on large feature maps. The setting
    holds for the whole process and cannot be undone, so the library leaves it to the program: `MALLOC_ARENA_MAX=1` in
    the environment does the same.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").mallopt(M_ARENA_MAX, 1)
