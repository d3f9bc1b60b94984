"""Store: finished cells, one JSON line each, one file per table; the only source of the tables."""

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
"""Incremented when the same settings would give another result: older lines stay in the file, but are ignored."""

PACKAGES = ("torch", "numpy", "scipy", "highspy")
"""Packages whose versions are recorded with every result."""

WHOLE_SCHEDULE = "the paper's"

EXACT = 2**53
"""Up to here every integer is exact as a float."""

Profile: TypeAlias = Literal["quick", "full"]


@dataclass(frozen=True)
class Cell:
    """One run of one table. Its settings are plain data and contain everything the result depends on, seeds included.

    `schedule` says how training was shortened, None if it was not. Cells are the same only if all fields agree: a
    quick one never counts as a full one.
    """

    table: str
    name: str
    settings: Mapping[str, Any] = field(hash=False)
    profile: Profile = "full"
    schedule: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.table, str) or not re.fullmatch("[a-z0-9][a-z0-9_-]*", self.table):
            raise InvalidSettingError(
                f"table: found {self.table!r}. Accepted: lower-case letters, digits, - and _, as it names a file."
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
        """Raises ValueError with the reason if the line is not a complete record."""
        try:
            data = parse_json(line)
        except ValueError as error:
            raise ValueError("not a complete line of JSON") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"not a {FORMAT}")
        if data.get("version") != FORMAT_VERSION:
            raise ValueError(f"format version {data.get('version')!r}; supported: {FORMAT_VERSION}")
        if data.pop("digest", None) != digest_content(data):
            raise ValueError("changed since it was written: its digest differs")
        record = from_plain(cls, data)
        if data.get("key") != record.key:
            raise ValueError("its key does not match its cell")
        return record


@dataclass(frozen=True)
class CellState:
    """Whether a cell is done; `schedule` is that of its result, if there is one."""

    table: str
    cell: str
    state: Literal["done", "shortened", "missing"]
    schedule: str | None = None


@dataclass(frozen=True)
class Store:
    """A folder of files `TABLE.jsonl`, which are append-only; if a cell has several lines, the last one counts.

    Several processes may append at the same time: every line is a single write. Unreadable lines are left in place
    and skipped; `find_problems` lists them.
    """

    folder: str | os.PathLike[str]

    def find(self, cell: Cell) -> Record | None:
        """The result of exactly this cell."""
        return self._read(cell.table)[0].get(cell.key)

    def find_all(self, table: str) -> list[Record]:
        """All results of a table, oldest first."""
        return [record for record in self._read(table)[0].values() if record.method == METHOD_VERSION]

    def find_missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """The cells without a result for exactly their settings."""
        wanted = list(cells)
        known = self._read_all(wanted)
        return [cell for cell in wanted if cell.key not in known[cell.table]]

    def find_best(self, *cells: Cell) -> list[Record | None]:
        """For each cell the result by the paper's schedule, else the newest by a shortened one, else None."""
        known = self._read_all(cells)
        return [_choose_best(cell, known[cell.table]) for cell in cells]

    def add(self, cell: Cell, result: Mapping[str, Any], machine: Mapping[str, Any] | None = None) -> Record:
        """Record a result, with versions, machine and time. It is on disk when this returns.

        `machine` describes where it was computed, by default this machine.
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

    def report_status(self, cells: Iterable[Cell]) -> list[CellState]:
        """Whether each cell is done, done by a shortened schedule, or missing."""
        wanted = list(cells)
        return [_judge(cell, record) for cell, record in zip(wanted, self.find_best(*wanted), strict=True)]

    def find_problems(self) -> list[str]:
        """The skipped lines of all tables: file, line number and reason."""
        tables = sorted(path.stem for path in Path(self.folder).glob("*.jsonl"))
        return [problem for table in tables for problem in self._read(table)[1]]

    def _read_all(self, cells: Iterable[Cell]) -> dict[str, dict[str, Record]]:
        """The records of the cells' tables, by table and key."""
        return {table: self._read(table)[0] for table in {cell.table for cell in cells}}

    def _path(self, table: str) -> Path:
        return Path(self.folder, f"{table}.jsonl")

    def _read(self, table: str) -> tuple[dict[str, Record], list[str]]:
        """The last record of every key, oldest first, and the lines skipped."""
        path = self._path(table)
        if not path.exists():  # or a broken link: writing will fail
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
        if record.cell.name == cell.name  # cheap test first
        and record.method == METHOD_VERSION
        and replace(record.cell, schedule=None) == whole
    ]
    return shortened[-1] if shortened else None


def _judge(cell: Cell, record: Record | None) -> CellState:
    if record is None:
        return CellState(cell.table, cell.name, "missing")
    schedule = record.cell.schedule
    return CellState(cell.table, cell.name, "done" if schedule is None else "shortened", schedule or WHOLE_SCHEDULE)


def _append(path: Path, line: bytes) -> None:
    """A single write to the end of the file, wherever that is by now.

    An incomplete last line is ended by a newline first. So is a line that another process is just writing, which
    leaves a harmless empty line.
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
    """The value as JSON returns it. 5.0 becomes 5, so that equal settings have equal keys."""
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
                f"{where}: found {value!r}. Accepted: text, finite numbers, booleans, None, and lists or mappings "
                "(with text as keys) of these."
            )
