import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

from critical_neurons.cli import memory

COUNT_ARENAS = """
import ctypes, sys, threading
from critical_neurons.cli.memory import reuse_freed_memory

if sys.argv[1] == "one":
    reuse_freed_memory()
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


COUNT_FAULTS = """
import ctypes, resource, sys
from critical_neurons.cli.memory import reuse_freed_memory

if sys.argv[1] == "reused":
    reuse_freed_memory()
libc = ctypes.CDLL("libc.so.6")
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = []
for _ in range(10):
    array = libc.malloc(2**26)
    ctypes.memset(array, 1, 2**26)
    libc.free(array)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[-1] - faults[0])
"""


@pytest.mark.skipif(not has_glibc(), reason="thresholds are glibc's")
def test_freed_memory_is_reused() -> None:
    """Ten arrays of 64 MB, one after the other: the pages of the first one are enough."""
    faults = {
        mode: int(subprocess.check_output([sys.executable, "-c", COUNT_FAULTS, mode])) for mode in ("fresh", "reused")
    }
    assert 10 * faults["reused"] < faults["fresh"]


def test_older_versions_of_glibc_take_a_smaller_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    """They refuse more than 32 MB; the other thresholds must not be set alone."""
    taken = []

    class Older:
        def __init__(self, name: str) -> None:
            pass

        def mallopt(self, option: int, value: int) -> int:
            refused = option == memory.M_MMAP_THRESHOLD and value > 2**25
            taken.extend([] if refused else [(option, value)])
            return int(not refused)

    monkeypatch.setattr(memory.ctypes, "CDLL", Older)
    memory.reuse_freed_memory()
    assert (memory.M_MMAP_THRESHOLD, memory.LESS_ALONE) in taken
    assert (memory.M_TRIM_THRESHOLD, memory.KEPT) in taken


def test_nothing_is_done_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(memory.ctypes, "CDLL", fail)
    memory.reuse_freed_memory()
