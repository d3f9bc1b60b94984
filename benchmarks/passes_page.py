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
    "pricing",
    "drafts",
    "bounds",
    "refitting",
    "other",
)
MOST_PASSES = {
    f"{case}/{effort}": most
    for cases, standard in (
        (("resnet20/1000", "vgg16/1000"), 40),
        (("resnet18/256", "resnet50/256", "mobilenet_v2/256", "vgg16_bn/256"), 30),
    )
    for case in cases
    for effort, most in (("quick", 12), ("standard", standard))
}
"""Targets by case."""

MOST_MEGABYTES = 6000
"""Target for 224x224."""

HEADER = (
    "network",
    "images",
    "effort",
    "target",
    "passes",
    "inspect",
    "pass, s",
    "search, s",
    "refit, s",
    "peak, MB",
    "accuracy",
    "load",
    "",
)
SECTION = """\
## Searching and refitting

The time of `cn.search(macs=0.5)` and `cn.prune(compensate="least_squares")` in processor seconds on one thread.
*Passes* is the sum of both as a multiple of one forward pass over the same inputs, the faster of two; the target for
224x224 includes a peak memory of 6 GB; *inspect* is the cost of `cn.inspect` in passes. With thorough effort the
smaller network is distilled, as by `cn.compress(effort="thorough")`. ResNet-20 and VGG-16 run on 1 000 CIFAR-10
images, and their accuracy is that on 2 500 validation images; the other networks run on random images of 224x224.
*Load* is the load average on the two cores: a busy machine slows forward passes and the rest unevenly. Measured by
`python benchmarks/passes.py run`, with memory allocated as in the command line tool, which keeps what a stage frees;
elsewhere, set `MALLOC_ARENA_MAX=1`, `MALLOC_MMAP_THRESHOLD_=268435456` and `MALLOC_TRIM_THRESHOLD_=1073741824`.
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


def list_current() -> list[dict[str, Any]]:
    """Lines with a commit were measured before later changes."""
    return [line for line in read_lines() if "commit" not in line]


def list_rows() -> list[str]:
    """Total cost beside its target, then cost by part."""
    lines = {line["name"]: line for line in list_current() if "workers" not in line}
    keys = (
        "passes",
        "inspect_passes",
        "pass_seconds",
        "search_seconds",
        "refit_seconds",
        "peak_megabytes",
        "accuracy",
        "load",
    )
    rows = []
    for name in {**MOST_PASSES, **lines}:
        line, most = lines.get(name, {}), MOST_PASSES.get(name)
        values = (str(line.get(key, "")) for key in keys)
        rows.append([*name.split("/"), "" if most is None else f"{most} passes", *values, _judge(name, line, most)])
    parts = [[name, *(str(line["parts"].get(part, "")) for part in PARTS)] for name, line in lines.items()]
    return [*format_table(HEADER, rows), "", *format_table(("processor seconds of", *PARTS), parts)]


def _judge(name: str, line: dict[str, Any], most: int | None) -> str:
    if most is None:
        return ""
    if not line:
        return "not measured"
    large = not name.startswith(("resnet20/", "vgg16/"))
    met = line["passes"] <= most and not (large and line["peak_megabytes"] > MOST_MEGABYTES)
    return "met" if met else "**not met**"


def list_workers() -> list[str]:
    lines = [line for line in list_current() if "workers" in line]
    header = ("network", "images", "workers", "wall clock, s", "calling process, s", "scores", "load before")
    rows = [
        [
            *line["name"].split("/")[:2],
            *(str(line[key]) for key in ("workers", "clock_seconds", "own_seconds", "scores", "load")),
        ]
        for line in lines
    ]
    return [WORKERS, *format_table(header, rows)] if rows else []
