"""Environment: versions and machine that a result was made with."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any


def describe_versions(*packages: str) -> dict[str, str]:
    """Python's version, ours and those of the packages that are installed."""
    versions = {"python": platform.python_version()}
    for package in ("critical_neurons", *packages):
        try:
            versions[package] = _find_version(package)
        except PackageNotFoundError:
            continue
    return versions


@cache
def _find_version(package: str) -> str:
    """As `importlib.metadata.version`, which parses all metadata of a package, its description included: that takes
    as long as solving a small program."""
    found = distribution(package)
    line = re.search(r"^Version: *(\S+)", found.read_text("METADATA") or "", re.MULTILINE)
    return found.version if line is None else line[1]


@cache
def digest_source() -> str:
    """A digest of the package's own code: two checkouts may have the same version number."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def describe_machine() -> dict[str, Any]:
    return {"processor": _name_processor(), "cores": os.cpu_count(), "system": platform.system()}


def _name_processor() -> str:
    """From /proc/cpuinfo; on other systems what Python knows, which is less."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
