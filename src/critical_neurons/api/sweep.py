"""The public `sweep`: smaller networks of several sizes, compared with the original."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from numbers import Real
from pathlib import Path
from typing import Any, get_args

from torch import nn

from critical_neurons.api.calibration import Data, gather_data, gather_test
from critical_neurons.api.compare import compare
from critical_neurons.api.compress_task import PAPER, carry_out, score_one_per_class
from critical_neurons.api.compression import Compression, load_compression, write_call
from critical_neurons.api.plan import plan
from critical_neurons.core.budget import Budget
from critical_neurons.core.curve import Curve, CurvePoint, Method, name_point
from critical_neurons.core.distillation import Distillation
from critical_neurons.core.files import make_folder
from critical_neurons.core.progress import Progress
from critical_neurons.core.scores import Scores
from critical_neurons.core.settings import (
    Compensation,
    DistanceName,
    EffortName,
    OutputDistance,
    check_share,
)
from critical_neurons.core.solver import Solver
from critical_neurons.core.structure import Measure, Structure
from critical_neurons.core.workers import HERE, Workers
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.parallel import SendMessage, open_executor
from critical_neurons.readers import isolated
from critical_neurons.removal.rows import digest_inputs
from critical_neurons.selection.budget_search import Search, SearchSettings
from critical_neurons.selection.norms import score_norms
from critical_neurons.structure import find_structure, fingerprint, unwrap

CURVE = "curve.json"
INTERRUPTED = "interrupted: some points are missing"


@dataclass(frozen=True)
class Sweep:
    """`curve` has the quality of all points, `networks` the result for each, by name, `call` the code that makes it.

    >>> found = cn.sweep(model, inputs, labels, units=[0.5], effort="quick")
    >>> found.pick(0.5).model[0].out_channels
    2
    """

    curve: Curve
    networks: Mapping[str, Compression]
    call: str = ""

    def __repr__(self) -> str:
        return f"Sweep({', '.join(self.networks)})"

    def __str__(self) -> str:
        return str(self.curve)

    def _repr_html_(self) -> str:
        return self.curve._repr_html_()

    def pick(self, share: float, method: Method = "search") -> Compression:
        """The result for this share."""
        wanted = name_point(method, share)
        if wanted not in self.networks:
            raise InvalidSettingError(f"pick: found {wanted}. Accepted: {', '.join(self.networks)}.")
        return self.networks[wanted]


@isolated
def sweep(
    model: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    units: Sequence[float] = (),
    params: Sequence[float] = (),
    macs: Sequence[float] = (),
    methods: Sequence[Method] = ("search",),
    test: tuple[Any, Any] | None = None,
    compensate: Compensation | Distillation = "least_squares",
    effort: EffortName = "standard",
    distance: DistanceName | OutputDistance = "auto",
    ignore: str | Sequence[str] = (),
    seed: int = 0,
    onnx: bool = False,
    folder: str | os.PathLike[str] | None = None,
    workers: Workers = HERE,
    progress: Callable[[str], None] = lambda text: None,
    detail: Callable[[str], None] = lambda text: None,
) -> Sweep:
    """A smaller network for each of several shares, as `compress` would make it, and its quality: `sweep.curve` can
    be printed, plotted and saved, `sweep.pick(0.4)` is one of the networks.

    Give one of `units`, `params` and `macs`: shares to keep at most. `methods` choose the units, and `compensate` is
    the same for all of them: "search"; "paper", by the paper's scores, which needs labels; "norm", by the norms of
    each unit's weights, layer by layer; "random", with as many units per layer as the search keeps. The rest is as
    for `compress`. The search is set up once for all shares; with several `workers` once for each of them, and times
    are then those of a busy machine.

    With a `folder` every point is written there as soon as it is found, and an interrupted sweep continues from
    there; so does one with the same settings and other shares or methods. Ctrl-C leaves the points found so far.

    >>> found = cn.sweep(model, inputs, labels, macs=[0.6, 0.3], effort="quick")
    >>> [point.share for point in found.curve.points]
    [0.6, 0.3]
    """
    units, params, macs = map(_check_shares, (units, params, macs))
    call = write_call(sweep, locals())
    given = {name: each for name, each in (("units", units), ("params", params), ("macs", macs)) if each}
    if len(given) != 1:
        raise InvalidSettingError("sweep: give the shares of one of units=, params= and macs=, as macs=[0.8, 0.5].")
    ((measure, shares),) = given.items()
    unknown = [each for each in methods if each not in get_args(Method)]
    if unknown or not methods:
        raise InvalidSettingError(f"methods: found {unknown or 'none'}. Accepted: {', '.join(get_args(Method))}.")
    data = gather_data(inputs, labels)
    if data.labels is None and "paper" in methods:
        raise InvalidInputError("labels: none. The paper's scores need the index of the right class of every input.")
    task = _SweepTask(
        unwrap(model),
        data,
        None if test is None else gather_test(test, data),
        measure=measure,  # type: ignore[arg-type]
        settings=SearchSettings(compensate, effort, distance, seed, ignore),
        onnx=onnx,
        call=call,
    )
    store = None if folder is None else _Store(Path(folder), task)
    wanted = list(product(methods, sorted(set(shares), reverse=True)))
    found = {} if store is None else store.read(wanted)
    missing = [each for each in wanted if each not in found]
    notes: tuple[str, ...] = ()
    try:
        pace = _Pace(len(missing), detail)
        with open_executor(workers, most=max(1, len(missing)), on_message=pace.pass_on) as executor:
            networks = "network" if len(missing) == 1 else "networks"
            progress(f"{len(missing)} {networks} to find" + (f", {len(found)} found before" if found else ""))
            tasks = ((name_point(method, share), partial(task.find, method, share)) for method, share in missing)
            for done in executor.run(tasks):
                if done.error is not None:
                    raise done.error
                pace.done += 1
                point, compression = done.result
                found[point.method, point.share] = done.result
                worth, value = point.worth
                progress(f"{point.name}: " + (f"{worth} {value:.4f}" if value is not None else "measured"))
                if store is not None:
                    store.add(point, compression)
    except KeyboardInterrupt:
        if not found:
            raise
        notes = (INTERRUPTED,)
    ordered = [found[each] for each in wanted if each in found]
    curve = Curve(task.measure, tuple(point for point, _ in ordered), task.record, notes)
    return Sweep(curve, {point.name: compression for point, compression in ordered}, call)


class _Pace:
    """How many networks of a sweep are found, and how long the others will take."""

    def __init__(self, total: int, report: Callable[[Progress], None]) -> None:
        self.done, self._total, self._report, self._began = 0, total, report, time.monotonic()

    def pass_on(self, name: str, message: Progress) -> None:
        """The stage of one network, and how far the sweep is."""
        pace = (time.monotonic() - self._began) / self.done if self.done else None
        left = None if pace is None else pace * (self._total - self.done)
        self._report(Progress(f"{name}, {message.stage}", self.done, self._total, left))


def _check_shares(shares: Any) -> tuple[float, ...]:
    found = (shares,) if isinstance(shares, Real) else tuple(shares)
    return tuple(float(check_share("shares", share)) for share in found)


def _digest(data: Data) -> str:
    """A digest of inputs and labels."""
    labels = b"" if data.labels is None else data.labels.tobytes()
    return hashlib.sha256("".join(digest_inputs(data.inputs)).encode() + labels).hexdigest()


@dataclass(frozen=True)
class _SweepTask:
    """What all points share. Structure and search are set up on first use, in the worker that uses them; `scored` has
    its scores so far, by share or method."""

    model: nn.Module
    data: Data
    test: Data | None
    measure: Measure
    settings: SearchSettings
    onnx: bool
    call: str
    scored: dict[float | Method, Scores] = field(default_factory=dict)

    @property
    def record(self) -> dict[str, Any]:
        """Everything that a point depends on, as plain data."""
        seen, tested = map(_digest, (self.data, self.compared_on))
        settings = self.settings
        return {
            "weights": fingerprint(self.model).weights,
            "measure": self.measure,
            "compensate": given.to_dict() if isinstance(given := settings.compensate, Distillation) else given,
            "effort": settings.effort,
            "distance": settings.distance,
            "ignore": list(settings.ignore),
            "seed": settings.seed,
            "inputs": seen,
            "test": tested,
        }

    @property
    def compared_on(self) -> Data:
        return self.data if self.test is None else self.test

    @cached_property
    def structure(self) -> Structure:
        return find_structure(self.model, self.data.inputs, ignore=self.settings.ignore)

    @cached_property
    def search(self) -> Search:
        return Search(self.model, self.data.inputs, self.settings, structure=self.structure)

    def find(self, method: Method, share: float, send: SendMessage) -> tuple[CurvePoint, Compression]:
        started = time.monotonic()
        scores = self._score(method, share, send)
        shares: dict[str, Any] = {self.measure: share}
        found = plan(scores, **shares, compensate=self.settings.compensate)
        if method == "random":
            found = found.random(self.settings.seed)
        smaller = carry_out(self.model, self.data, self.settings, found, send)
        seconds = time.monotonic() - started
        send(Progress("measuring"))
        inputs, labels = self.compared_on.inputs, self.compared_on.labels
        comparison = compare(self.model, smaller, inputs, labels, calibration=self.data.inputs, onnx=self.onnx)
        call = f"{self.call}.pick({share:g}, {method!r})"
        point = CurvePoint(method, share, comparison, seconds)
        return point, Compression(smaller, found, scores, comparison, inputs, call)

    def _score(self, method: Method, share: float, send: SendMessage) -> Scores:
        if method == "norm":
            return score_norms(self.model, self.structure)
        key = method if method == "paper" else share  # random removal counts the units of the search
        if key not in self.scored and method == "paper":
            self.scored[key] = score_one_per_class(self.model, self.data, self.settings, PAPER, Solver(), send)
        elif key not in self.scored:
            self.search.on_progress = send
            self.scored[key] = self.search.find(Budget(**{self.measure: share}))  # type: ignore[arg-type]
        return self.scored[key]


@dataclass(frozen=True)
class _Store:
    """A folder with the points found so far, and a folder for the network of each."""

    folder: Path
    task: _SweepTask

    def read(self, wanted: Sequence[tuple[Method, float]]) -> dict[tuple[Method, float], Any]:
        make_folder(self.folder)
        inputs = self.task.compared_on.inputs
        return {
            (point.method, point.share): (point, load_compression(self.folder / point.name, self.task.model, inputs))
            for point in self._curve().points
            if (point.method, point.share) in wanted
        }

    def add(self, point: CurvePoint, found: Compression) -> None:
        found.save(self.folder / point.name, overwrite=True)
        before = self._curve()
        replace(before, points=(*before.points, point)).save(self.folder / CURVE)

    def _curve(self) -> Curve:
        if not (self.folder / CURVE).exists():
            return Curve(self.task.measure, (), self.task.record)
        curve = Curve.load(self.folder / CURVE)
        if dict(curve.settings) != self.task.record:
            differ = [name for name, value in self.task.record.items() if curve.settings.get(name) != value]
            raise InvalidSettingError(
                f"{self.folder}: holds a sweep with other {', '.join(differ)}. Give another folder, or the same "
                "settings."
            )
        return curve
