import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from critical_neurons.cli import memory

COUNT_ARENAS = """
import ctypes, sys, threading
from critical_neurons.cli.memory import use_one_arena

if sys.argv[1] == "one":
    use_one_arena()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
barrier = threading.Barrier(4)
threads = [threading.Thread(target=lambda: (libc.malloc(64), barrier.wait())) for _ in range(4)]
for each in threads:
    each.start()
for each in threads:
    each.join()
libc.fopen.restype, libc.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
report = libc.fopen(sys.argv[2].encode(), b"w")
libc.malloc_info(0, report)
libc.fclose(report)
"""


def has_glibc() -> bool:
    try:
        return hasattr(ctypes.CDLL("libc.so.6"), "malloc_info")
    except OSError:
        return False


@pytest.mark.skipif(not has_glibc(), reason="arenas are glibc's")
def test_threads_share_one_arena(tmp_path: Path) -> None:
    counts = {}
    for arenas in ("many", "one"):
        report = tmp_path / arenas
        subprocess.run([sys.executable, "-c", COUNT_ARENAS, arenas, str(report)], check=True)
        counts[arenas] = report.read_text().count("<heap nr=")
    assert counts["one"] == 1 < counts["many"]


def test_nothing_is_done_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(memory.ctypes, "CDLL", fail)
    memory.use_one_arena()
