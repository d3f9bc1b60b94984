"""Passes page: stored cases of benchmarks/passes.py to a section of docs/performance.md."""

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

`python benchmarks/passes.py run`: `cn.search(macs=0.5)` and `cn.prune(compensate="least_squares")`, processor seconds
on one thread, and as multiples of one forward pass over the same inputs. ResNet-20 on 1 000 CIFAR-10 images, accuracy
on 2 500 validation images; the others, if there are any, on noise of 224x224. The least of two passes counts.
*Load* is how many processes wanted to run on the two cores: a busy machine slows passes and the rest unevenly.
Lines with a commit were measured there. At 0b44375, four seconds of the first call went into importing torch's
compiler, every trial of pricing was a whole pass, and batch norms took a fifth of refitting. At 9c3be31 and before,
drafts were compared by a pass of their own, ridges tried from the largest down, and pricing at standard effort took
ten passes instead of six.
"""


WORKERS = """\
A search shared among processes (`cn.search(workers=cn.Workers(jobs=...))`, standard effort): seconds of the clock
with the start of the processes, and of the processor in the calling one, which refits drafts. *Scores* is a digest:
they are the same to the last bit. Where as many processes are at work already as there are cores, two get a larger
share of them than one.
"""


def describe_passes() -> str:
    return "\n".join([SECTION, *list_rows(), "", *list_workers(), ""])


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def list_rows() -> list[str]:
    """What was taken in all, and then by part, where that was followed."""
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
    header = ("network", "images", "workers", "clock, s", "calling process, s", "scores", "processes before")
    rows = [
        [
            *line["name"].split("/")[:2],
            *(str(line[key]) for key in ("workers", "clock_seconds", "own_seconds", "scores", "load")),
        ]
        for line in lines
    ]
    return [WORKERS, *format_table(header, rows)] if rows else []
