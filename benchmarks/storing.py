"""Storing: append a result as one JSON line with the date, the seed, the machine and the versions."""

from __future__ import annotations

import datetime
import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

SEED = 0


def store_line(path: Path, result: dict[str, Any]) -> None:
    record = {
        "date": datetime.date.today().isoformat(),
        **result,
        "seed": SEED,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("critical_neurons", "torch", "highspy", "cvxpy", "clarabel")},
    }
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(result), flush=True)
