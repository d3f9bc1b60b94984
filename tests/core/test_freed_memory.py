import ctypes
from pathlib import Path

import pytest

from critical_neurons.core import freed_memory

COUNT, SIZE = 64, 2**20
"""Blocks of a megabyte: many, but each too small for memory of its own."""

STATUS = Path("/proc/self/statm")


def has_trim() -> bool:
    try:
        return STATUS.exists() and hasattr(ctypes.CDLL("libc.so.6"), "malloc_trim")
    except OSError:
        return False


def count_pages() -> int:
    return int(STATUS.read_text().split()[1])


@pytest.mark.skipif(not has_trim(), reason="the heap is glibc's")
def test_free_pages_between_blocks_in_use_are_given_back() -> None:
    libc = ctypes.CDLL("libc.so.6")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    sizes = (SIZE // 16, SIZE // 128) * 16 * COUNT  # a small block keeps large ones apart
    blocks = [libc.malloc(size) for size in sizes]
    for block, size in zip(blocks, sizes, strict=True):
        ctypes.memset(block, 1, size)
    for block in blocks[::2]:
        libc.free(block)
    before = count_pages()
    freed_memory.return_freed_memory()
    after = count_pages()
    for block in blocks[1::2]:
        libc.free(block)
    assert before - after > COUNT * SIZE // 2 // 4096


def test_nothing_is_done_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(freed_memory.ctypes, "CDLL", fail)
    freed_memory.return_freed_memory()
