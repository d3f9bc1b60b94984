"""Soak test: many damaged files and random networks, each of which must give the right result or one clear error.

python benchmarks/soak.py run --files 10000 --networks 2000     everything not stored in benchmarks/results/soak.jsonl
python benchmarks/soak.py run --kind "file: npz" --files 20000   one kind only
python benchmarks/soak.py again                                  repeat seeds with violations
python benchmarks/soak.py try --kind network --seed 17           one case, with its traceback
python benchmarks/soak.py report                                 stored results and every violation
python benchmarks/soak.py page                                   the same as docs/soak.md

Every batch of seeds is stored as one line with its commit, so that an interrupted run can be resumed. A seed
determines its file or network. Of every kind of file, half are damaged at random, and half are forged: changed by
someone who knows the format, with valid checksums.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

from critical_neurons.errors import CriticalNeuronsError
from soak_networks import go_the_whole_way
from storing import store_line
from tests.io.damage import forge, mutate
from tests.io.loaders import WRITERS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "soak.jsonl"
PAGE = ROOT / "docs" / "soak.md"
FILES_PER_LINE, NETWORKS_PER_LINE = 1000, 50
MOST_SECONDS = {"file": 5.0, "network": 60.0}
"""Limit of processor seconds per case."""

MEMORY = 12 * 2**30
"""Limit of the address space in bytes, so that a file that makes the loader allocate more is noticed."""

TEMPLATE = """# Soak

Written by `python benchmarks/soak.py page` from `benchmarks/results/soak.jsonl`; `make soak` runs what is not stored
there, and can be resumed. A case is identified by its kind and seed:
`python benchmarks/soak.py try --kind network --seed 17` runs one case, `python benchmarks/soak.py again` all those
with violations.

* **Files**: of every kind, half are damaged at random (bytes changed, inserted, cut, moved), half changed with valid
  checksums (values of other types and ranges; entries missing, repeated or renamed). Each must load as the intact
  file does or raise one error of the package, within 5 s and 12 GB of address space. `.safetensors`, ONNX and torch's
  old format have no checksums: what is loaded must be finite and of the right shapes.
* **Networks**: random layers, norms, joins and reshapes, through `inspect`, `search`, `plan`, `prune`, `mask`,
  `save`, `load`, every tenth through `export` to ONNX and back, every tenth to `torch.export`; networks with a
  program through `score`, with all three formulations. Masked equals removed; saved equals loaded, bit by bit; no
  layer is empty; the bound is below the objective; points of the box lie in the bounds; scores at 1 give the logits;
  small programs have the same optimum, eliminated or literal; the model is unchanged.

Versions: {versions}; commit {commits}.

"Fixed" are violations that the run found; their seeds passed when repeated on the fixed code.

| kind | cases | outcomes | fixed | violations | processor seconds |
|---|---:|---|---:|---:|---:|
{rows}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "again", "try", "report", "page"])
    parser.add_argument("--files", type=int, default=10_000, help="damaged files of every kind")
    parser.add_argument("--networks", type=int, default=2_000)
    parser.add_argument("--kind", help="run only this kind; for try, the kind of the seed")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.RLIM_INFINITY))
    match given.action:
        case "run":
            run(given.files, given.networks, given.kind)
        case "again":
            run_again()
        case "try":
            print({kind: check for kind, check, *_ in list_kinds(1, 1)}[given.kind or "network"](given.seed))
        case "page":
            PAGE.write_text(write_page(read_lines()))
    if given.action in ("run", "again", "report"):
        print("\n".join(" ".join(map(str, row)) for row in list_rows(read_lines())))


def run(files: int, networks: int, only: str | None = None) -> None:
    done, commit = {(line["kind"], line.get("first")) for line in read_lines()}, find_commit()
    for kind, check, total, size in list_kinds(files, networks):
        for first in range(0, total, size):
            if (kind, first) not in done and only in (None, kind):
                seeds = range(first, min(first + size, total))
                began, outcomes = time.process_time(), Counter[str]()
                violations = [found for seed in seeds if (found := attempt(check, kind, seed, outcomes))]
                seconds = round(time.process_time() - began, 1)
                result = {"kind": kind, "first": first, "count": len(seeds), "cpu_seconds": seconds, "commit": commit}
                store_line(RESULTS, result | {"outcomes": dict(outcomes), "violations": violations})


def run_again() -> None:
    """Repeat the seeds with open violations on the current code."""
    checks, commit = {kind: check for kind, check, *_ in list_kinds(1, 1)}, find_commit()
    for kind, (left, _) in find_violations(read_lines()).items():
        if left:
            began, outcomes = time.process_time(), Counter[str]()
            violations = [found for seed in left if (found := attempt(checks[kind], kind, seed, outcomes))]
            seconds = round(time.process_time() - began, 1)
            result = {"kind": kind, "again": sorted(left), "count": 0, "cpu_seconds": seconds, "commit": commit}
            store_line(RESULTS, result | {"outcomes": dict(outcomes), "violations": violations})


def find_violations(lines: list[dict[str, Any]]) -> dict[str, tuple[dict[int, dict[str, Any]], int]]:
    """By kind: the open violations by seed, and the number of those that a later run shows to be fixed."""
    found: dict[str, tuple[dict[int, dict[str, Any]], int]] = {}
    for line in lines:
        left, mended = found.get(line["kind"], ({}, 0))
        now = {violation["seed"]: violation for violation in line["violations"]}
        fixed = [seed for seed in line.get("again", ()) if seed not in now]
        kept = {seed: violation for seed, violation in left.items() if seed not in fixed}
        found[line["kind"]] = kept | now, mended + len(fixed)
    return found


def list_kinds(files: int, networks: int) -> Iterator[tuple[str, Callable[[int], str], int, int]]:
    for name in WRITERS:
        yield f"file: {name}", partial(load_damaged, name), files, FILES_PER_LINE
    yield "network", go_the_whole_way, networks, NETWORKS_PER_LINE


def attempt(check: Callable[[int], str], kind: str, seed: int, outcomes: Counter[str]) -> dict[str, Any] | None:
    """The violation, or None."""
    began = time.process_time()
    try:
        outcomes[check(seed)] += 1
        seconds = time.process_time() - began
        assert seconds <= MOST_SECONDS[kind.partition(":")[0]], f"took {seconds:.1f} s"
    except Exception as error:  # any exception is a violation
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return {"seed": seed, "error": f"{type(error).__name__}: {error}"[:300], "at": f"{frame.name}:{frame.lineno}"}
    return None


@cache
def write_whole(kind: str) -> tuple[Path, Callable[[], Any], bytes, Any]:
    path, load = WRITERS[kind](Path(tempfile.mkdtemp()))
    return path, load, path.read_bytes(), load()


def load_damaged(kind: str, seed: int) -> str:
    """The file must load as the intact one does, or raise an error of the package; a forged one may load
    differently."""
    path, load, content, expected = write_whole(kind)
    change = (mutate, forge)[seed % 2]
    path.write_bytes(change(content, random.Random(f"{kind} {seed}")))
    try:
        found = load()
    except CriticalNeuronsError:
        return "refused"
    assert change is forge or found == expected, "a damaged file loads differently"
    return "as before" if found == expected else "read"


def find_commit() -> str:
    """The commit of the running code, which must have no uncommitted changes."""
    git = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True, check=True)
    changed = git(["git", "status", "--porcelain", "src", "tests", "benchmarks/*.py"]).stdout
    if changed:
        raise SystemExit(f"Commit these first, so that the results can name their commit:\n{changed}")
    return git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip()


def read_lines() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def list_rows(lines: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    """Kind, number of cases, outcomes, violations fixed and open, processor seconds; then the open violations."""
    violations = find_violations(lines)
    for kind in dict.fromkeys(line["kind"] for line in lines):
        own = [line for line in lines if line["kind"] == kind]
        outcomes = sum((Counter(line["outcomes"]) for line in own), Counter[str]())
        left, mended = violations[kind]
        went = ", ".join(f"{count:,} {name or 'nothing to remove'}" for name, count in outcomes.most_common())
        seconds = round(sum(line["cpu_seconds"] for line in own))
        yield kind, f"{sum(line['count'] for line in own):,}", went, mended, len(left), seconds
        for violation in left.values():
            yield "", violation


def write_page(lines: list[dict[str, Any]]) -> str:
    rows = [f"| {' | '.join(map(str, row))} |" for row in list_rows(lines) if row[0]]
    versions = ", ".join(f"{name} {each}" for name, each in lines[-1]["versions"].items())
    commits = ", ".join(dict.fromkeys(f"`{line['commit']}`" for line in lines))
    return TEMPLATE.format(rows="\n".join(rows), versions=versions, commits=commits)


if __name__ == "__main__":
    main()
