"""The public `lossless`: a smaller model with the same outputs on a whole box of inputs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from critical_neurons.core.batch import CALIBRATED_ON, gather_batch
from critical_neurons.core.bounds import Interval
from critical_neurons.core.box import make_boxes
from critical_neurons.core.deadline import reading_until
from critical_neurons.core.files import check_writable
from critical_neurons.core.network import Affine, Network
from critical_neurons.core.plan import Plan
from critical_neurons.core.progress import Progress, Stage
from critical_neurons.core.settings import check_flag, check_number, check_seed
from critical_neurons.core.stability import Stability, State, digest_boxes
from critical_neurons.core.structure import Floats
from critical_neurons.core.workers import HERE, Workers, check_workers
from critical_neurons.errors import WorkersError
from critical_neurons.formulations.bound_propagation import bound_values
from critical_neurons.parallel import SendMessage, Task, open_executor
from critical_neurons.readers import copy_for_reading, isolated, read_network
from critical_neurons.removal.copies import copy_whole
from critical_neurons.removal.fold import Folding
from critical_neurons.removal.metrics import count_parameters
from critical_neurons.removal.remove import keep_attributes, own_tensors, remove_units
from critical_neurons.removal.same_outputs import check_removal
from critical_neurons.stability.decide import Decision
from critical_neurons.stability.inquiry import Inquiry, Reply
from critical_neurons.stability.points import Points
from critical_neurons.structure import unwrap

CHECKED, CHECKED_AT_ONCE = 64, 8
"""Points of the boxes at which both models are compared, in float64; fewer if time is short, but some."""

BUILDING = 1.5
"""Time kept for building the smaller model, relative to that of reading the model."""

SAVED_EVERY = 10.0
"""Seconds between two writes of the record."""

PARTS_PER_SLOT = 4
"""Tasks per slot of the workers: with several, the last one does not delay all."""


@dataclass(frozen=True, eq=False)
class Lossless:
    """A smaller `model` with the original's outputs on the whole box. `stability` has the proof for every unit and
    the changes of every layer. `plan` has the removed units: `save` accepts both, unless a layer collapsed.
    `parameters` are their numbers before and after.

    >>> found = cn.lossless(model, (0.0, 1.0), inputs=inputs, time_limit=5)
    >>> before, after = found.parameters
    >>> after <= before
    True
    """

    model: nn.Module
    stability: Stability
    plan: Plan
    parameters: tuple[int, int]

    def __str__(self) -> str:
        before, after = self.parameters
        return f"{self.stability}\nparameters {before:,} to {after:,} ({after / max(before, 1):.1%})"

    def __repr__(self) -> str:
        before, after = self.parameters
        return f"Lossless({self.stability!r}, {before} to {after} parameters)"


@isolated
def lossless(
    model: nn.Module,
    box: Any = None,
    *,
    inputs: Any = None,
    radius: float | None = None,
    time_limit: float = 300.0,
    collapse: bool = True,
    workers: Workers = HERE,
    record: str | os.PathLike[str] | None = None,
    seed: int = 0,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Lossless:
    """A smaller model with the same outputs, up to rounding, for every input in the box: removals are proved to make
    no difference there. The given model is not changed.

    * `box`: a pair (lower, upper) of numbers, or of arrays of the shape of one input. With numbers, `inputs`
      determine the shape.
    * `inputs`: data points, which must lie in the box; units that are on at one and off at another need no proof.
      With a `radius` there is a small box around each of them, intersected with `box` if that is given.
    * Units that are always off are removed. Always active units whose weights are linear combinations of others are
      folded into the next layers, as are units equal to a multiple of another. With `collapse`, a linear layer whose
      units are all active is merged with the next.
    * `time_limit`: seconds; units that are undecided when proofs have to end, or at Ctrl-C, stay. If none is decided
      by then, a copy of the model is returned. `workers` share the programs.
    * `record`: a file in which proofs are stored as they come, and from which those of an earlier call are read.

    >>> found = cn.lossless(model, (0.0, 1.0), inputs=inputs, time_limit=5)
    >>> torch.allclose(found.model(inputs), model(inputs), atol=1e-5)
    True
    """
    started = time.monotonic()
    seconds = check_number("time_limit", time_limit, Real, lambda value: value > 0, "a number of seconds above 0")
    check_flag("collapse", collapse)
    check_workers(workers)
    data = None if inputs is None else gather_batch(inputs).inputs
    boxes = make_boxes(box, data, radius)
    source = unwrap(model)
    example = torch.from_numpy((boxes.lower[:3] + boxes.upper[:3]) / 2)
    with reading_until(started, seconds):
        network = read_network(source, example)
    deadline = started + seconds - BUILDING * (time.monotonic() - started)
    task = _LosslessTask(network, boxes, started, deadline, workers, record, progress)
    stability = task.prove(data, check_seed(seed))
    if time.monotonic() >= deadline and not any(unit.state in (State.OFF, State.ON) for unit in stability.units):
        return _leave(source, network, stability)
    found = _build(source, network, stability, boxes, collapse=collapse, end=started + seconds)
    return replace(found, stability=replace(found.stability, seconds=time.monotonic() - started))


def _leave(source: nn.Module, network: Network, stability: Stability) -> Lossless:
    """A copy of the model as it is."""
    stays, weights = np.ones(network.unit_count + 1, dtype=bool), {"weights": network.fingerprint.weights}
    plan = Plan(network.structure, stays, {}, "lossless", weights)
    return Lossless(copy_whole(source), stability, plan, (count_parameters(source),) * 2)


class _LosslessTask:
    def __init__(
        self,
        network: Network,
        boxes: Interval,
        started: float,
        deadline: float,
        workers: Workers,
        record: str | os.PathLike[str] | None,
        progress: Callable[[Progress], None],
    ) -> None:
        self._network, self._boxes, self._digest = network, boxes, digest_boxes(boxes)
        self._started, self._deadline, self._workers = started, deadline, workers
        self._record, self._progress = record, progress
        self._saved, self._lock = time.monotonic(), threading.Lock()
        self._decision: Decision | None = None

    def prove(self, data: Floats | None, seed: int) -> Stability:
        known = self._load()
        points = Points(self._network, self._boxes, seed)
        self._decision = Decision(self._network, self._boxes, points, self._run, self._deadline)
        if known is not None:
            self._decision.take_over(known.units)
        stopped = ""
        try:
            points.draw(self._deadline)
            if data is not None:
                points.look(data, self._deadline)
            self._decision.decide()
        except KeyboardInterrupt:
            stopped = "interrupted"
        except WorkersError as error:
            stopped = str(error)
        found = self._describe(stopped)
        if self._record is not None:
            found.save(self._record)
        return found

    def _load(self) -> Stability | None:
        if self._record is None:
            return None
        check_writable(self._record)
        if not Path(self._record).exists():
            return None
        known = Stability.load(self._record)
        known.check(self._network.structure, self._digest)
        return known

    def _describe(self, stopped: str) -> Stability:
        assert self._decision is not None
        units = self._decision.describe()
        late = time.monotonic() >= self._deadline and any(unit.state is State.UNDECIDED for unit in units)
        return Stability(
            self._network.fingerprint,
            self._digest,
            {layer.name: tuple(layer.units[layer.units >= 0].tolist()) for layer in self._network.removable},
            units,
            time.monotonic() - self._started,
            stopped or ("time limit" if late else ""),
        )

    def _run(self, inquiries: Sequence[Inquiry], end: float, on_message: Callable[[Inquiry, Reply], None]) -> None:
        """Answer all inquiries on the workers, until `end`."""
        under_way: dict[str, Inquiry] = {}
        total = sum(len(inquiry.questions) for inquiry in inquiries)
        done = 0
        boxes = f"{len(inquiries)} boxes" if len(inquiries) > 1 else "the box"
        stage = Stage(self._progress, f"proving: questions about {boxes}", deadline=end)
        stage(done, total)

        def note(name: str, reply: Reply) -> None:
            nonlocal done
            with self._lock:  # called from several threads
                on_message(under_way[name], reply)
                done += 1
                stage(done, total)
                self._keep()

        def draw(slots: int) -> Iterator[tuple[str, Task]]:
            for number, inquiry in enumerate(inquiries):
                for part in inquiry.split(1 if slots == 1 else PARTS_PER_SLOT * slots):
                    left = end - time.monotonic()
                    if left <= 0:
                        return
                    name = f"{number}.{len(under_way)}"
                    under_way[name] = part
                    yield name, partial(_answer, part, left)

        with open_executor(self._workers, most=total, on_message=note) as executor:
            for finished in executor.run(draw(executor.slots)):
                if finished.error is not None:
                    raise finished.error

    def _keep(self) -> None:
        if self._record is not None and time.monotonic() - self._saved >= SAVED_EVERY:
            self._saved = time.monotonic()
            self._describe("under way").save(self._record)


def _answer(inquiry: Inquiry, seconds: float, send: SendMessage) -> None:
    inquiry.answer(send, seconds)


def _build(
    source: nn.Module, network: Network, stability: Stability, boxes: Interval, *, collapse: bool, end: float
) -> Lossless:
    """Build the smaller model, and compare it with the original in float64."""
    exact, folded = copy_for_reading(source), copy_for_reading(source)
    folding = Folding(folded, network, [unit.state for unit in stability.units], _find_ranges(network, boxes))
    smaller = own_tensors(remove_units(folded, folding.structure, folding.stays), folded)
    if collapse:
        folding.collapse(smaller)
    for number, points in enumerate(torch.split(torch.from_numpy(_draw(boxes)), CHECKED_AT_ONCE)):
        if number == 0 or time.monotonic() < end:
            check_removal(exact, smaller, points)
    _bring_back(smaller, source)
    keep_attributes(smaller, source)
    reasons = {change.name: change.sentence for change in folding.changes}
    plan = Plan(network.structure, folding.stays, reasons, "lossless", {"weights": network.fingerprint.weights})
    found = replace(stability, changes=folding.changes)
    return Lossless(smaller, found, plan, (count_parameters(source), count_parameters(smaller)))


def _find_ranges(network: Network, boxes: Interval) -> dict[str, Interval]:
    """The range of every layer's input, element by element, over all boxes; by the layer's name."""
    values = bound_values(network, boxes)
    read = {op.name: values[op.source] for op in network.ops if isinstance(op, Affine) and not op.keeps_channels}
    return {
        name: Interval(interval.lower.min(axis=0).reshape(-1), interval.upper.max(axis=0).reshape(-1))
        for name, interval in read.items()
    }


def _draw(boxes: Interval) -> Floats:
    """Points of the boxes, half of them corners."""
    generator = np.random.default_rng(0)
    which = generator.integers(len(boxes.lower), size=CHECKED)
    shares = generator.random((CHECKED, *boxes.lower.shape[1:]))
    shares[::2] = shares[::2].round()
    return boxes.lower[which] + shares * (boxes.upper - boxes.lower)[which]


def _bring_back(smaller: nn.Module, source: nn.Module) -> None:
    """Restore the types, devices and modes of the original."""
    tensors = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    usual = next((values for values in tensors.values() if values.is_floating_point()), None)
    modes = {name: module.training for name, module in source.named_modules()}
    for name, module in smaller.named_modules():
        module.training = modes[name]
    for name, values in [*smaller.named_parameters(), *smaller.named_buffers()]:
        like = tensors.get(name, usual)
        if like is not None:
            values.data = values.data.to(like.device, like.dtype)
    setattr(smaller, CALIBRATED_ON, getattr(source, CALIBRATED_ON, frozenset()))
