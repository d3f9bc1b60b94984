"""The command `doctor`."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from importlib import metadata

from critical_neurons.cli.options import Json
from critical_neurons.cli.terminal import reports_errors, show, show_json
from critical_neurons.errors import InvalidSettingError

PACKAGE = "critical_neurons"

PURPOSES = {
    "cvxpy": "any conic solver of CVXPY, as cvxpy:NAME",
    "dask": "work on a Dask cluster",
    "datasets": "data sets by name, image folders",
    "demo": "the demo on scikit-learn's digits",
    "docs": "building the documentation",
    "embedding": "smaller networks inside optimisation problems",
    "jobs": "work on several processes",
    "onnx": "ONNX files in and out, onnxruntime, int8",
    "plot": "pictures, and the charts of reports",
    "reproduce": "the paper's experiments",
    "scip": "SCIP as a solver",
    "torch-pruning": "scores as an importance for Torch-Pruning",
}

FOR_DEVELOPERS = ("dev",)

REQUIREMENT = re.compile(r"^([\w.-]+)\s*(?:\[([^\]]*)\])?\s*\(?([^;)]*)\)?(?:;.*?extra\s*==\s*['\"]([\w.-]+)['\"])?")
"""Name, its extras, versions, and our extra that needs it."""


@dataclass(frozen=True)
class Requirement:
    package: str
    accepted: str
    found: str | None

    @property
    def met(self) -> bool:
        """Whether it is installed and recent enough; other conditions are left to pip."""
        least = re.search(r">=\s*([\d.]+)", self.accepted)
        return self.found is not None and (least is None or _count(self.found) >= _count(least[1]))

    def __str__(self) -> str:
        if self.met:
            return f"{self.package} {self.found}"
        return f"{self.package} {f'{self.found} (needs {self.accepted})' if self.found else 'missing'}"


@reports_errors
def doctor(as_json: Json = False) -> None:
    """Say what is installed, which extras are missing and how to get them.

    \b
    Example:
      critical-neurons doctor
    """
    try:
        by_extra = read_requirements(metadata.requires(PACKAGE) or [])
    except metadata.PackageNotFoundError as error:
        raise InvalidSettingError(
            f"{PACKAGE} is run from its source without being installed, so that its extras are not known. Install it "
            "with: pip install --editable ."
        ) from error
    required = by_extra.pop("", [])
    missing = [extra for extra, needs in by_extra.items() if not all(each.met for each in needs)]
    if as_json:
        from critical_neurons.core.environment import describe_machine, describe_versions

        extras = {extra: [{**asdict(each), "met": each.met} for each in needs] for extra, needs in by_extra.items()}
        show_json(
            {
                "versions": describe_versions(),
                "machine": describe_machine(),
                "required": [{**asdict(each), "met": each.met} for each in required],
                "extras": extras,
                "missing": missing,
            }
        )
        return
    _show(required, by_extra, missing)


def read_requirements(lines: list[str]) -> dict[str, list[Requirement]]:
    """Requirements by extra, "" for those always needed. Extras made of others include their requirements."""
    parsed = [found.groups() for line in lines if (found := REQUIREMENT.match(line))]
    own: dict[str, list[Requirement]] = {}
    parts: dict[str, list[str]] = {}
    for name, others, accepted, extra in parsed:
        own.setdefault(extra or "", [])
        if _is_ours(name):
            parts.setdefault(extra, []).extend(other.strip() for other in (others or "").split(","))
        else:
            own[extra or ""].append(Requirement(name, accepted.strip(), _find_version(name)))

    def gather(extra: str) -> list[Requirement]:
        found = own.get(extra, []) + [each for part in parts.get(extra, ()) for each in gather(part)]
        return list(dict.fromkeys(found))

    return {extra: gather(extra) for extra in own if extra not in FOR_DEVELOPERS}


def _show(required: list[Requirement], by_extra: dict[str, list[Requirement]], missing: list[str]) -> None:
    from rich.console import Group
    from rich.text import Text

    from critical_neurons.cli.tables import make_table
    from critical_neurons.core.environment import describe_machine, describe_versions

    table = make_table("Extra", "For", "State", "Packages")
    table.add_row("", "everything", _judge(required), ", ".join(map(str, required)))
    for extra, needs in sorted(by_extra.items()):
        state = "missing" if extra in missing else "installed"
        table.add_row(extra, PURPOSES.get(extra, ""), state, ", ".join(map(str, needs)))
    machine = describe_machine()
    lines = [
        ", ".join(f"{name} {version}" for name, version in describe_versions().items()),
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}",
    ]
    advice = [Text()] + [Text(f"For {extra}: pip install '{PACKAGE}[{extra}]'") for extra in sorted(missing)]
    show(Group(*map(Text, lines), Text(), table, *(advice if missing else ())))


def _judge(needs: list[Requirement]) -> str:
    return "installed" if all(each.met for each in needs) else "missing"


def _is_ours(name: str) -> bool:
    return name.replace("-", "_") == PACKAGE


def _find_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _count(version: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    leading = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, leading[0].split("."))) if leading else ()
