"""Content: the content of a report as plain data, independent of its presentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from critical_neurons.core.answers import Change, ClassCount
from critical_neurons.core.search_history import RemovalCost, SearchHistory
from critical_neurons.core.solution import Step

FORMAT = "critical_neurons report"
FORMAT_VERSION = 1

ValueKind: TypeAlias = Literal["share", "count", "bytes", "seconds"]
"""How a quantity is formatted."""


CHANCE = 0.05
"""Relative differences of times below this count as noise."""


@dataclass(frozen=True)
class Gain:
    """A quantity before and after pruning. `before` is None for a quantity of both networks together, such as a
    difference; `note` then describes it."""

    name: str
    kind: ValueKind
    before: float | None
    after: float
    note: str = ""

    @property
    def worse(self) -> bool:
        """A lower accuracy, or more of anything else; times only beyond noise."""
        if self.before is None:
            return False
        if self.kind == "share":
            return self.after < self.before
        return self.after > self.before * (1 + CHANCE if self.kind == "seconds" else 1)


@dataclass(frozen=True)
class LayerWidth:
    """A layer and its number of channels. `kept_because` is the reason if none can be removed, else empty."""

    name: str
    kind: str
    before: int
    after: int
    kept_because: str


@dataclass(frozen=True)
class Rail:
    """Channels that several layers write, and that are removed together, or that other layers than the next read:
    skip connections. Layers are given by index; overlapping rails have different lanes. `kept`: none can be
    removed."""

    name: str
    lane: int
    writers: tuple[int, ...]
    readers: tuple[int, ...]
    kept: bool = False


@dataclass(frozen=True)
class Strip:
    """The units of one layer, or shared by several: their scores, and whether they stay; None if unknown. For very
    large networks only every `stride`-th unit is listed."""

    layers: tuple[str, ...]
    units: int
    kept: int | None
    scores: tuple[float, ...] | None
    stays: tuple[bool, ...] | None
    stride: int = 1

    @property
    def mean(self) -> float | None:
        return sum(self.scores) / len(self.scores) if self.scores else None


@dataclass(frozen=True)
class Solved:
    """The outcome of one program: status, objective, bound and gap."""

    name: str
    status: str
    objective: float | None
    bound: float | None
    gap: float | None
    seconds: float


@dataclass(frozen=True)
class ChoiceError:
    """The choice of units in one or more layers: its least-squares error, a lower bound for any choice of as many,
    and the cost of removing fewer or more."""

    layers: tuple[str, ...]
    cost: RemovalCost | None
    error: float
    bound: float | None
    gap: float | None


@dataclass(frozen=True)
class Trials:
    """Candidate networks: the share kept and the value of `evaluate` for each; `before` is the value for the original
    network, `max_drop` the largest drop allowed."""

    before: float
    max_drop: float
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Course:
    """How the units were found: a summary, and the solver's history, search, programs, choices and trials, if any."""

    summary: str
    history: tuple[Step, ...] = ()
    search: SearchHistory | None = None
    programs: tuple[Solved, ...] = ()
    choices: tuple[ChoiceError, ...] = ()
    trials: Trials | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurveDot:
    """A network of a sweep: the method of choosing units, the shares of MACs, parameters and time that remain, and
    its quality (`worth`)."""

    method: str
    share: float
    macs: float | None
    parameters: float | None
    time: float | None
    worth: float | None


@dataclass(frozen=True)
class TradeOff:
    """The networks of a sweep, and the quality of the original (`before`)."""

    measure: str
    worth: str
    before: float | None
    dots: tuple[CurveDot, ...]


@dataclass(frozen=True)
class Answered:
    """The predictions of both networks on `inputs` inputs. Of very many `classes` those that changed most are listed,
    of very many `changes` the first. `fates` counts all changes by kind."""

    inputs: int
    data: str
    class_count: int
    classes: tuple[ClassCount, ...]
    fates: Mapping[str, int]
    changes: tuple[Change, ...]

    @property
    def changed(self) -> int:
        return sum(self.fates.values())


@dataclass(frozen=True)
class Content:
    """Everything on the page but images. `facts` are settings, versions and digests by heading; `call` is the command
    that reproduces the report."""

    title: str
    rule: str
    gains: tuple[Gain, ...]
    measured: tuple[tuple[str, str, str, str], ...]
    measured_notes: tuple[str, ...]
    layers: tuple[LayerWidth, ...]
    rails: tuple[Rail, ...]
    strips: tuple[Strip, ...]
    course: Course | None
    trade_off: TradeOff | None
    answered: Answered | None
    class_names: tuple[str, ...]
    facts: Mapping[str, Mapping[str, str]]
    call: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {"format": FORMAT, "version": FORMAT_VERSION, **asdict(self)}
