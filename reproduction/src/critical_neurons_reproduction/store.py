"""Store: finished cells of the experiments, one JSON line each in a file per table. Tables are made from it alone."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from critical_neurons.core.documents import digest_content, from_plain, parse_json, read_file
from critical_neurons.core.environment import describe_machine, describe_versions
from critical_neurons.errors import InvalidSettingError, OutputError

FORMAT = "critical_neurons cell"
FORMAT_VERSION = 2

METHOD_VERSION = 1
"""Raised when the same settings would give another result: lines of older versions stay, but count no more."""

PACKAGES = ("torch", "numpy", "scipy", "highspy")
"""Whose versions are recorded with every result."""

WHOLE_SCHEDULE = "the paper's"

EXACT = 2**53
"""Up to here a whole float is the same number as an int."""

Profile: TypeAlias = Literal["quick", "full"]


@dataclass(frozen=True)
class Cell:
    """One run of one table: its settings are plain data and name everything the result depends on, seeds included.

    `schedule` says in what way training is shorter than the paper's, None where it is not. Cells that differ in
    anything are different: a quick one never counts as a full one.
    """

    table: str
    name: str
    settings: Mapping[str, Any] = field(hash=False)
    profile: Profile = "full"
    schedule: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.table, str) or not re.fullmatch("[a-z0-9][a-z0-9_-]*", self.table):
            raise InvalidSettingError(
                f"table: found {self.table!r}. Accepted: small letters, digits, - and _, as it names a file."
            )
        if not isinstance(self.name, str) or not self.name:
            raise InvalidSettingError(f"{self.table}: a cell is named {self.name!r}. Accepted: a text.")
        if self.profile not in get_args(Profile):
            accepted = ", ".join(map(repr, get_args(Profile)))
            raise InvalidSettingError(f"{self.name}: profile={self.profile!r}. Accepted: {accepted}.")
        if self.schedule is not None and (not isinstance(self.schedule, str) or not self.schedule):
            raise InvalidSettingError(
                f"{self.name}: schedule={self.schedule!r}. Accepted: a text, or None for the paper's schedule."
            )
        object.__setattr__(self, "settings", _plain_mapping(self.settings, f"{self.name}: settings"))

    @property
    def key(self) -> str:
        """A digest of everything in the cell and of the method's version."""
        return self._digest(METHOD_VERSION)

    def _digest(self, method: int) -> str:
        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        content = json.dumps({"method": method, **parts}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Record:
    """A finished cell; `recorded` is the time in UTC."""

    cell: Cell
    result: Mapping[str, Any] = field(hash=False)
    method: int
    recorded: str
    versions: Mapping[str, str] = field(hash=False)
    machine: Mapping[str, Any] = field(hash=False)

    @property
    def key(self) -> str:
        return self.cell._digest(self.method)

    def to_line(self) -> bytes:
        """One line of JSON, with the newline."""
        data = {"format": FORMAT, "version": FORMAT_VERSION, "key": self.key, **asdict(self)}
        return json.dumps({**data, "digest": digest_content(data)}).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Record:
        """Raises ValueError, and says why, where the line is not a whole record."""
        try:
            data = parse_json(line)
        except ValueError as error:
            raise ValueError("not a whole line of JSON") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a {FORMAT}")
        if data.get("version") != FORMAT_VERSION:
            raise ValueError(f"of version {data.get('version')!r}, where {FORMAT_VERSION} is read")
        if data.pop("digest", None) != digest_content(data):
            raise ValueError("changed since it was written: its digest is another")
        record = from_plain(cls, data)
        if data.get("key") != record.key:
            raise ValueError("its key is not that of its cell")
        return record


@dataclass(frozen=True)
class State:
    """How far a cell is; `schedule` is that of the result, if there is one."""

    table: str
    cell: str
    state: Literal["done", "shortened", "missing"]
    schedule: str | None = None


@dataclass(frozen=True)
class Store:
    """A folder of `TABLE.jsonl`. Lines are only ever added; of several for a cell the last one counts.

    Several processes may add at once: every line is one write to the end of the file. Lines that cannot be read are
    left as they are and skipped; `find_problems` names them.
    """

    folder: str | os.PathLike[str]

    def find(self, cell: Cell) -> Record | None:
        """The result of exactly this cell."""
        return self._read(cell.table)[0].get(cell.key)

    def find_all(self, table: str) -> list[Record]:
        """The results of a table, whatever their cells, oldest first."""
        return [record for record in self._read(table)[0].values() if record.method == METHOD_VERSION]

    def find_missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Those without a result of exactly their settings."""
        wanted = list(cells)
        known = self._read_all(wanted)
        return [cell for cell in wanted if cell.key not in known[cell.table]]

    def find_best(self, *cells: Cell) -> list[Record | None]:
        """Of each cell the result by the paper's schedule, whatever its own; else the newest by a shortened one."""
        known = self._read_all(cells)
        return [_choose_best(cell, known[cell.table]) for cell in cells]

    def add(self, cell: Cell, result: Mapping[str, Any], machine: Mapping[str, Any] | None = None) -> Record:
        """Record a result, with versions, machine and time. It is on the disk when this returns.

        `machine` is the one it was made on, by default this one.
        """
        record = Record(
            cell,
            _plain_mapping(result, f"{cell.name}: result"),
            METHOD_VERSION,
            datetime.now(UTC).isoformat(timespec="seconds"),
            describe_versions(*PACKAGES),
            describe_machine() if machine is None else dict(machine),
        )
        path = self._path(cell.table)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            _append(path, record.to_line())
        except OSError as error:
            raise OutputError(f"{path}: the result cannot be written ({error.strerror or error}).") from error
        return record

    def report_status(self, cells: Iterable[Cell]) -> list[State]:
        """What is done, what is done by a shortened schedule and what is missing, in the order of the cells."""
        wanted = list(cells)
        return [_judge(cell, record) for cell, record in zip(wanted, self.find_best(*wanted), strict=True)]

    def find_problems(self) -> list[str]:
        """The lines of all tables that were skipped: file, number and why."""
        tables = sorted(path.stem for path in Path(self.folder).glob("*.jsonl"))
        return [problem for table in tables for problem in self._read(table)[1]]

    def _read_all(self, cells: Iterable[Cell]) -> dict[str, dict[str, Record]]:
        """The records of their tables, by table and key."""
        return {table: self._read(table)[0] for table in {cell.table for cell in cells}}

    def _path(self, table: str) -> Path:
        return Path(self.folder, f"{table}.jsonl")

    def _read(self, table: str) -> tuple[dict[str, Record], list[str]]:
        """The last record of every key, oldest first, and what was skipped."""
        path = self._path(table)
        if not path.exists():  # or a link to a file that is gone: writing will tell
            return {}, []
        content = read_file(path)
        records: dict[str, Record] = {}
        problems = []
        for number, line in enumerate(content.split(b"\n"), start=1):
            if not line.strip():
                continue
            try:
                record = Record.from_line(line)
            except ValueError as error:
                problems.append(f"{path}, line {number}: {error}.")
                continue
            records.pop(record.key, None)
            records[record.key] = record
        return records, problems


def _choose_best(cell: Cell, records: Mapping[str, Record]) -> Record | None:
    whole = replace(cell, schedule=None)
    if whole.key in records:
        return records[whole.key]
    shortened = [
        record
        for record in records.values()
        if record.cell.name == cell.name  # the rest takes longer to compare
        and record.method == METHOD_VERSION
        and replace(record.cell, schedule=None) == whole
    ]
    return shortened[-1] if shortened else None


def _judge(cell: Cell, record: Record | None) -> State:
    if record is None:
        return State(cell.table, cell.name, "missing")
    schedule = record.cell.schedule
    return State(cell.table, cell.name, "done" if schedule is None else "shortened", schedule or WHOLE_SCHEDULE)


def _append(path: Path, line: bytes) -> None:
    """One write to the end of the file, wherever others have moved it.

    What is torn there is ended first; what others are just writing looks torn too, and an empty line follows it.
    """
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o666)
    try:
        if os.lseek(file, 0, os.SEEK_END) > 0:
            os.lseek(file, -1, os.SEEK_END)
            if os.read(file, 1) != b"\n":
                line = b"\n" + line
        written = os.write(file, line)
        os.fsync(file)
    finally:
        os.close(file)
    if written < len(line):
        raise OSError(f"only {written} of {len(line)} bytes; is the disk full?")


def _plain_mapping(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidSettingError(f"{where}: found {type(value).__name__}. Accepted: a mapping of plain data.")
    plain: dict[str, Any] = _plain(value, where)
    return plain


def _plain(value: Any, where: str) -> Any:
    """As JSON gives it back. 5.0 becomes 5: equal settings have equal keys."""
    match value:
        case None | str() | bool():
            return value
        case Integral():
            return int(value)
        case Real() if math.isfinite(value):
            number = float(value)
            return int(number) if number.is_integer() and abs(number) <= EXACT else number
        case Mapping() if all(isinstance(key, str) for key in value):
            return {key: _plain(each, f"{where}.{key}") for key, each in value.items()}
        case list() | tuple():
            return [_plain(each, f"{where}[{at}]") for at, each in enumerate(value)]
        case _:
            raise InvalidSettingError(
                f"{where}: found {value!r}. Accepted: text, finite numbers, booleans, None, and lists or mappings by "
                "text of these."
            )
