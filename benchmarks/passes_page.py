"""Passes page: the section of docs/performance.md on stored cases of benchmarks/passes.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from critical_neurons.core.markdown import format_table

RESULTS = Path(__file__).parent / "results" / "passes.jsonl"
PARTS = (
    "structure",
    "covariances",
    "Fisher matrices",
    "elimination",
    "exchanges",
    "pricing",
    "drafts",
    "bounds",
    "refitting",
    "other",
)
HEADER = (
    "network",
    "images",
    "effort",
    "commit",
    "passes",
    "pass, s",
    "search, s",
    "refit, s",
    "peak, MB",
    "accuracy",
    "load",
)
SECTION = """\
## Searching and refitting

The time of `cn.search(macs=0.5)` and `cn.prune(compensate="least_squares")` in processor seconds on one thread.
*Passes* is the sum of both as a multiple of one forward pass over the same inputs, the faster of two. ResNet-20 runs
on 1 000 CIFAR-10 images, and its accuracy is that on 2 500 validation images; other networks run on random images of
224x224. *Load* is the load average on the two cores: a busy machine slows forward passes and the rest unevenly.
Measured by `python benchmarks/passes.py run`.

Lines with a commit were measured at that commit. These things were different then:

* At 0b44375, the first call spent four seconds on importing torch's compiler, every trial of pricing took a whole
  forward pass, and batch norms took a fifth of refitting.
* At 9c3be31 and before, comparing drafts took a separate pass, ridges were tried from the largest down, and pricing
  at standard effort took ten passes instead of six.
* At 3b574f5 and before, every thread had its own memory arena, and the products of each batch were added up
  separately. In the command line tool threads now share an arena.
* At 26fa57e and before, kept units were exchanged for removed ones ([ablation.md](ablation.md)), and freed memory
  was returned to the system. The command line tool now keeps it; elsewhere, set `MALLOC_ARENA_MAX=1`,
  `MALLOC_MMAP_THRESHOLD_=1073741824` and `MALLOC_TRIM_THRESHOLD_=1073741824`.
"""


WORKERS = """\
A parallel search (`cn.search(workers=cn.Workers(jobs=...))`, standard effort): wall-clock seconds, including the
start of the processes, and processor seconds of the calling process, which does the refitting. *Scores* is a digest
of the scores, which are identical to the last bit. If all cores are busy already, two workers get a larger share of
them than one.
"""


def describe_passes() -> str:
    return "\n".join([SECTION, *list_rows(), "", *list_workers(), ""])


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def list_rows() -> list[str]:
    """Total cost, then cost by part, for lines that recorded it."""
    lines = [line for line in read_lines() if "workers" not in line]
    keys = ("passes", "pass_seconds", "search_seconds", "refit_seconds", "peak_megabytes", "accuracy", "load")
    rows = [
        [*line["name"].split("/"), line.get("commit", ""), *(str(line.get(key, "")) for key in keys)]
        for line in lines
    ]
    followed = [line for line in lines if "parts" in line]
    parts = [[line["name"], *(str(line["parts"].get(part, "")) for part in PARTS)] for line in followed]
    return [*format_table(HEADER, rows), "", *format_table(("processor seconds of", *PARTS), parts)]


def list_workers() -> list[str]:
    lines = [line for line in read_lines() if "workers" in line]
    header = ("network", "images", "workers", "wall clock, s", "calling process, s", "scores", "load before")
    rows = [
        [
            *line["name"].split("/")[:2],
            *(str(line[key]) for key in ("workers", "clock_seconds", "own_seconds", "scores", "load")),
        ]
        for line in lines
    ]
    return [WORKERS, *format_table(header, rows)] if rows else []
