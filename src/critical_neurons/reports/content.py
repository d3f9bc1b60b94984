"""Content: what a report says, as plain data. How it is shown is decided elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from critical_neurons.core.answers import Change, ClassCount
from critical_neurons.core.search_history import RemovalCost, SearchHistory
from critical_neurons.core.solution import Step

FORMAT = "critical_neurons report"
FORMAT_VERSION = 1

Kind: TypeAlias = Literal["share", "count", "bytes", "seconds"]
"""How a quantity is written."""


CHANCE = 0.05
"""Times that differ by less are taken for the same."""


@dataclass(frozen=True)
class Gain:
    """A quantity before and after. None before: it is of both networks together, such as a difference, and `note`
    says what it is."""

    name: str
    kind: Kind
    before: float | None
    after: float
    note: str = ""

    @property
    def worse(self) -> bool:
        """Less accurate, or more of anything else; of times as much more as is not chance."""
        if self.before is None:
            return False
        if self.kind == "share":
            return self.after < self.before
        return self.after > self.before * (1 + CHANCE if self.kind == "seconds" else 1)


@dataclass(frozen=True)
class LayerWidth:
    """A layer and how many channels it has. With a `kept_because` none can be removed."""

    name: str
    kind: str
    before: int
    after: int
    kept_because: str


@dataclass(frozen=True)
class Rail:
    """Channels that several layers write and that are removed together, or that not only the next layer reads: skip
    connections. Layers by their place; `lane` keeps rails that overlap apart. `kept`: all of them must stay."""

    name: str
    lane: int
    writers: tuple[int, ...]
    readers: tuple[int, ...]
    kept: bool = False


@dataclass(frozen=True)
class Strip:
    """The units that one layer has, or several share: scores, and which stay. None where not known. Of a very large
    network only every `stride`-th unit is listed."""

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
    """A program: how it ended, and what was proved."""

    name: str
    status: str
    objective: float | None
    bound: float | None
    gap: float | None
    seconds: float


@dataclass(frozen=True)
class ChoiceError:
    """Of the units of some layers, the least-squares error of the choice and the bound below which no other falls;
    and what it would have cost to remove fewer or more of them."""

    layers: tuple[str, ...]
    cost: RemovalCost | None
    error: float
    bound: float | None
    gap: float | None


@dataclass(frozen=True)
class Trials:
    """Smaller networks judged on the way: the share kept and what `evaluate` says of each, beside what it says of the
    network `before` and how much may be lost."""

    before: float
    max_drop: float
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Course:
    """How the units were found: a sentence, and what there is of steps, stages, programs, choices and trials."""

    summary: str
    history: tuple[Step, ...] = ()
    search: SearchHistory | None = None
    programs: tuple[Solved, ...] = ()
    choices: tuple[ChoiceError, ...] = ()
    trials: Trials | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CurveDot:
    """A network of a sweep: how its units were chosen, what is left of multiply-adds, parameters and time as shares,
    and what it is worth."""

    method: str
    share: float
    macs: float | None
    parameters: float | None
    time: float | None
    worth: float | None


@dataclass(frozen=True)
class TradeOff:
    """What a sweep found, and what the network `before` is worth."""

    measure: str
    worth: str
    before: float | None
    dots: tuple[CurveDot, ...]


@dataclass(frozen=True)
class Answered:
    """The classes that both networks name for a number of `inputs`. If there are very many `classes`, those that
    changed most are listed; of very many `changes`, the first. `fates` counts all changes by their kind."""

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
    """Everything on the page but pictures. `facts` are settings, versions and digests by heading; `call` is what to
    run to get it again."""

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
