"""Decide: the state of every unit on all boxes, layer by layer: first by bounds, then points, then programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from critical_neurons.core.bounds import Interval
from critical_neurons.core.deadline import TimeIsUp, until
from critical_neurons.core.network import Network, Relu
from critical_neurons.core.stability import ProofMethod, State, UnitStability
from critical_neurons.core.structure import Bools, Floats, Ints
from critical_neurons.formulations.bound_propagation import bound_values
from critical_neurons.formulations.bound_propagation.backward import Backward
from critical_neurons.stability.inquiry import Inquiry, Question, Reply
from critical_neurons.stability.points import Points
from critical_neurons.stability.relaxation import TooLarge, relax

ROUNDING = 1e-11
"""Tolerance for rounding in float64, relative to the largest bound of a layer."""

MOST_WORK = 2 * 10**9
"""Limit on the work of backward substitution, about half a minute; later layers get intervals only."""

MOST_TIGHTENED = 500
"""Layers with more undecided elements get no tighter bounds for the sake of later layers."""

METHODS: tuple[ProofMethod, ...] = ("interval", "backward", "linear program", "integer program")
INTERVAL, BACKWARD, LINEAR, INTEGER = range(4)

Run: TypeAlias = Callable[[Sequence[Inquiry], float, Callable[[Inquiry, Reply], None]], None]
"""Runs inquiries, in any order, until a time (of `time.monotonic`), and reports every reply."""


class _Ends:
    """Bounds of a ReLU's input, (boxes, elements), and the method that decided each sign."""

    def __init__(self, interval: Interval, units: Ints) -> None:
        self.lower, self.upper = (end.reshape(len(end), -1).copy() for end in (interval.lower, interval.upper))
        self.units = units
        self.slack = ROUNDING * max(1.0, float(np.abs([self.lower, self.upper]).max()))
        self.rank = np.full(self.lower.shape, INTERVAL)

    @property
    def open(self) -> Bools:
        return (self.lower < -self.slack) & (self.upper > self.slack)

    def narrow(self, lower: Floats, upper: Floats, rank: int) -> None:
        before = self.open
        np.maximum(self.lower, lower, out=self.lower)
        np.minimum(self.upper, upper, out=self.upper)
        self.rank[before & ~self.open] = rank

    def improve(self, sample: int, question: Question, bound: float, rank: int) -> None:
        lower, upper = (np.full(self.lower.shape, end) for end in (-np.inf, np.inf))
        if question.sign > 0:
            upper[sample, question.element] = bound
        else:
            lower[sample, question.element] = -bound
        self.narrow(lower, upper, rank)


class Decision:
    """The state of all units so far. If `decide` is interrupted, what is known so far is kept."""

    def __init__(self, network: Network, boxes: Interval, points: Points, run: Run, deadline: float) -> None:
        self._network, self._boxes, self._points, self._run = network, boxes, points, run
        self._deadline = deadline
        count = network.unit_count + 1  # the last entry stands for NO_UNIT
        self._ends: dict[int, _Ends] = {}
        self._programs = np.zeros(count, dtype=np.int64)
        self._known: dict[int, UnitStability] = {}
        self._backward, self._work = Backward(network, pruned=False), 0
        self._sources = {
            op.source: np.broadcast_to(op.units, op.shape).reshape(-1) for op in network.ops if isinstance(op, Relu)
        }

    def take_over(self, known: Sequence[UnitStability]) -> None:
        """Reuse earlier results for the same network and boxes."""
        self._known = {each.unit: each for each in known if each.state is not State.UNDECIDED}
        for unit, each in self._known.items():
            if each.highest is not None and each.lowest is not None:
                self._points.note(unit, each.lowest, each.highest)

    def decide(self) -> None:
        bound_values(self._network, self._boxes, tighten=self._tighten)

    def describe(self) -> tuple[UnitStability, ...]:
        count = self._network.unit_count + 1
        lower, upper = np.full(count, np.inf), np.full(count, -np.inf)
        rank, slack, whole = np.zeros(count, dtype=np.int64), np.zeros(count), np.zeros(count, dtype=bool)
        for units in self._sources.values():
            whole[units] = True
        for source, units in self._sources.items():
            ends = self._ends.get(source)
            if ends is None:
                whole[units] = False
                continue
            np.minimum.at(lower, units, ends.lower.min(axis=0))
            np.maximum.at(upper, units, ends.upper.max(axis=0))
            np.maximum.at(rank, units, ends.rank.max(axis=0))
            np.maximum.at(slack, units, ends.slack)
        lower[~whole], upper[~whole] = -np.inf, np.inf
        found = []
        for unit in range(self._network.unit_count):
            low, high = self._points.lowest[unit], self._points.highest[unit]
            state: State = State.UNDECIDED
            method: ProofMethod = "none"
            if upper[unit] <= slack[unit] or lower[unit] >= -slack[unit]:
                state = State.OFF if upper[unit] <= slack[unit] else State.ON
                method = METHODS[rank[unit]]
            elif high > slack[unit] and low < -slack[unit]:
                state, method = State.UNSTABLE, "points"
            proved = _as_number(lower[unit]), _as_number(upper[unit])
            seen = _as_number(low), _as_number(high)
            each = UnitStability(unit, state, method, *proved, *seen, programs=int(self._programs[unit]))
            known = self._known.get(unit)
            found.append(known if known is not None and known.state in (state, State.OFF, State.ON) else each)
        return tuple(found)

    def _tighten(self, index: int, values: dict[int, Interval]) -> Interval:
        """The interval of value `index`, tightened to decide the units of the ReLU that reads it."""
        plain = values[index]
        if index not in self._sources:
            return self._substitute(index, values)
        ends = self._ends[index] = _Ends(plain, self._sources[index])
        self._recall(ends)
        tight = self._substitute(index, values)
        ends.narrow(tight.lower.reshape(ends.lower.shape), tight.upper.reshape(ends.lower.shape), BACKWARD)
        later = sum(source > index for source in self._sources)
        self._climb(index, ends, self._find_end(0.5 / (1 + later)))
        self._ask(index, ends, values, self._find_end(1.0 / (1 + later)), tighten=later > 0)
        lower, upper = ends.lower.reshape(plain.lower.shape), ends.upper.reshape(plain.lower.shape)
        return Interval(lower, np.maximum(lower, upper))

    def _recall(self, ends: _Ends) -> None:
        """Apply earlier proofs of units that are on or off."""
        lower, upper = np.full(self._network.unit_count + 1, -np.inf), np.full(self._network.unit_count + 1, np.inf)
        for unit, known in self._known.items():
            if known.state in (State.ON, State.OFF):
                lower[unit], upper[unit] = known.lower, known.upper
        ends.narrow(lower[ends.units], upper[ends.units], INTERVAL)

    def _substitute(self, index: int, values: dict[int, Interval]) -> Interval:
        below = sum(int(np.prod(op.shape)) for op in self._network.ops[: index + 1])
        self._work += 2 * values[index].lower.size * below
        if self._work > MOST_WORK:
            return values[index]
        try:
            with until(self._deadline):
                return self._backward.tighten(index, values)
        except TimeIsUp:
            return values[index]

    def _doubtful(self, ends: _Ends, sign: float) -> Bools:
        """Elements (boxes, elements) whose sign still has to be proved for their unit to be off (+1) or on (-1)."""
        seen = self._points.highest if sign > 0 else -self._points.lowest
        possible = (seen <= ends.slack) & (np.arange(len(seen)) < self._network.unit_count)
        beyond = ends.upper > ends.slack if sign > 0 else ends.lower < -ends.slack
        return beyond & possible[ends.units]

    def _find_end(self, share: float) -> float:
        """The time at which this share of the remaining seconds will be used up."""
        now = time.monotonic()
        return now + share * max(0.0, self._deadline - now)

    def _climb(self, index: int, ends: _Ends, end: float) -> None:
        """Gradient ascent for every unit that was never seen on, and descent for every one never seen off."""
        tops = [(ends.upper, 1.0), (-ends.lower, -1.0)]
        chosen = []
        for high, sign in tops:
            samples, elements = np.nonzero(self._doubtful(ends, sign))
            order = np.argsort(-high[samples, elements], kind="stable")
            _, first = np.unique(ends.units[elements[order]], return_index=True)
            picked = order[first]
            chosen.append((samples[picked], elements[picked], np.full(len(picked), sign)))
        samples, elements, signs = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
        self._points.climb(index, samples, elements, signs, end)

    def _ask(self, index: int, ends: _Ends, values: dict[int, Interval], end: float, *, tighten: bool) -> None:
        inquiries = [
            inquiry
            for sample in range(len(ends.lower))
            if (inquiry := self._inquire(index, sample, ends, values, end, tighten=tighten)) is not None
        ]

        def on_message(inquiry: Inquiry, reply: Reply) -> None:
            rank = LINEAR if reply.answer.nodes <= 1 else INTEGER
            ends.improve(inquiry.sample, reply.question, reply.answer.bound, rank)
            self._programs[reply.question.unit] += reply.answer.nodes
            if np.isfinite(reply.answer.seen):
                self._points.look(reply.answer.inputs.reshape(1, *self._network.input_shape))

        if inquiries:
            self._run(inquiries, end, on_message)

    def _inquire(
        self, index: int, sample: int, ends: _Ends, values: dict[int, Interval], end: float, *, tighten: bool
    ) -> Inquiry | None:
        """The questions about a box; None if there are none, or if the program is too large or takes too long."""
        doubtful = {sign: self._doubtful(ends, sign)[sample] for sign in (1.0, -1.0)}
        wide = ends.open[sample] & tighten
        elements = np.flatnonzero(doubtful[1.0] | doubtful[-1.0] | (wide if wide.sum() <= MOST_TIGHTENED else False))
        if not len(elements):
            return None
        below = {at: Interval(end.lower[sample], end.upper[sample]) for at, end in values.items() if at < index}
        box = Interval(self._boxes.lower[sample], self._boxes.upper[sample])
        try:
            with until(end):
                relaxation = relax(self._network, index, elements, box, below)
        except (TooLarge, TimeIsUp):
            return None
        if not sum(map(len, relaxation.pairs)):
            return None  # bounds of affine functions are attained: nothing to gain
        questions: list[Question] = []
        for sign, high in ((1.0, ends.upper[sample]), (-1.0, -ends.lower[sample])):
            order = sorted(range(len(elements)), key=lambda row: (ends.units[elements[row]], -high[elements[row]]))
            questions += [
                Question(int(ends.units[element]), int(element), row, sign, bool(doubtful[sign][element]))
                for row, element in ((row, elements[row]) for row in order)
                if doubtful[sign][element] or wide[element]
            ]
        return Inquiry(relaxation, sample, tuple(questions), ends.slack)


def _as_number(end: float) -> float | None:
    return float(end) if np.isfinite(end) else None
