"""Solving: small programs with known answers, the same for every solver."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from scipy import sparse
from scipy.special import logsumexp, softmax

from critical_neurons.core.loss import SoftmaxLoss
from critical_neurons.core.program import Program, Rows
from critical_neurons.core.solution import Status
from critical_neurons.errors import InvalidSettingError, SolverError
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.solvers import Capability, Limits, find_solver, ignore_progress
from critical_neurons.solvers.cutting_planes import LEAST_VIOLATION, ROWS_PER_ROUND, _choose_front
from critical_neurons.solvers.highs import HighsEngine
from critical_neurons.solvers.lp_engine import Outcome
from tests.zoo import share_case

ANSWER = 1e-4
"""Relative difference between an objective and the known answer."""

SOUND = 1e-6
"""By how much rounding may push a bound above the answer."""

OVERTIME = 2.0
"""Seconds by which a time limit may be missed."""

LIMITS = Limits(gap=1e-6, time_limit=20.0, threads=1)
LOOPS = ["highs", "scip"]
"""Solvers under the loop that adds rows and cuts."""

SOLVERS = [*LOOPS, "cvxpy:CLARABEL"]

INFINITE = np.inf


@dataclass(frozen=True)
class NoTerm:
    """A convex term without functions."""

    column_count: int

    @property
    def columns(self):
        return slice(0, 0)

    def logits(self, point):
        return np.zeros((0, 2))

    def values(self, point):
        return np.zeros(0)

    def cuts(self, point, which):
        raise AssertionError("there is nothing to cut")

    def affine_forms(self):
        return sparse.csr_array((0, self.column_count)), np.zeros(0), SoftmaxLoss(np.zeros(0, dtype=np.int64))


@dataclass(frozen=True)
class LogSumExp:
    """One function: log(sum_c exp(l_c)) - l_0 of the logits l = matrix x + offset, below the last column."""

    matrix: np.ndarray
    offset: np.ndarray

    @property
    def columns(self):
        return slice(self.matrix.shape[1] - 1, self.matrix.shape[1])

    def logits(self, point):
        finite = np.where(np.isfinite(point), point, 0.0)  # the epigraph column may be anything: no logit reads it
        return (self.matrix @ finite + self.offset)[None]

    def values(self, point):
        logits = self.logits(point)[0]
        return np.array([logsumexp(logits) - logits[0]])

    def cuts(self, point, which):
        finite = np.where(np.isfinite(point), point, 0.0)
        seed = softmax(self.logits(point)[0])
        seed[0] -= 1.0
        slope = seed @ self.matrix
        row = -slope
        row[-1] += 1.0
        return Rows(sparse.csr_array(row[None]), self.values(point) - slope @ finite, np.array([INFINITE]))

    def affine_forms(self):
        return sparse.csr_array(self.matrix), self.offset, SoftmaxLoss(np.zeros(1, dtype=np.int64))


@dataclass
class Source:
    """Rows given as a dense matrix; notes which of them were asked for."""

    matrix: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    rows_at_once: int = 7

    @property
    def row_count(self):
        return self.count

    built: list = field(default_factory=list)

    @property
    def count(self):
        return len(self.lower)

    @property
    def ends(self):
        return np.array([self.count])

    def violations(self, point):
        values = self.matrix @ point
        return np.maximum(self.lower - values, values - self.upper)

    def build(self, numbers):
        self.built.extend(numbers.tolist())
        return Rows(sparse.csr_array(self.matrix[numbers]), self.lower[numbers], self.upper[numbers])


def make_program(cost, lower, upper, *, rows=(), sources=(), integer=None, term=None, **more):
    """rows: (coefficients, lower, upper)."""
    cost = np.array(cost, dtype=np.float64)
    size = len(cost)
    matrix = np.array([row for row, _, _ in rows], dtype=np.float64).reshape(len(rows), size)
    return Program(
        blocks={"gate": slice(0, 0 if integer is None else size)},
        cost=cost,
        lower=np.array(lower, dtype=np.float64),
        upper=np.array(upper, dtype=np.float64),
        integer=np.zeros(size, dtype=bool) if integer is None else np.array(integer),
        rows=Rows(
            sparse.csr_array(matrix),
            np.array([low for _, low, _ in rows], dtype=np.float64),
            np.array([high for _, _, high in rows], dtype=np.float64),
        ),
        sources=tuple(sources),
        term=term or NoTerm(size),
        **more,
    )


def box():
    """min x - 2 y over [0, 1] x [0, 3]: -6."""
    return make_program([1, -2], [0, 0], [1, 3])


def linear():
    """min -x - y, x + 2 y <= 4, 3 x + y <= 6, x, y >= 0: x = 1.6, y = 1.2."""
    rows = [([1, 2], -INFINITE, 4), ([3, 1], -INFINITE, 6)]
    return make_program([-1, -1], [0, 0], [INFINITE] * 2, rows=rows)


def polygon(count=40):
    """min -x - y inside a polygon around the unit circle, its sides as a source of rows: -sqrt(2)."""
    angles = np.pi / 4 + 2 * np.pi * np.arange(count) / count
    matrix = np.column_stack([np.cos(angles), np.sin(angles)])
    source = Source(matrix, np.full(count, -INFINITE), np.ones(count))
    return make_program([-1, -1], [-2, -2], [2, 2], sources=[source])


def equality():
    """min x + y + z, x + y = 1, y + z = 1 in [0, 1]: y = 1."""
    return make_program([1, 1, 1], [0] * 3, [1] * 3, rows=[([1, 1, 0], 1, 1), ([0, 1, 1], 1, 1)])


def fixed():
    """A column with equal bounds: min x + y, x = 0.25, x + y >= 1: 1."""
    return make_program([1, 1], [0.25, 0], [0.25, 1], rows=[([1, 1], 1, INFINITE)])


def convex():
    """min t + x / 4 with t >= log(1 + exp(-x)), -5 <= x <= 5: exp(-x) = 1/3."""
    term = LogSumExp(np.array([[1.0, 0.0], [0.0, 0.0]]), np.zeros(2))
    return make_program([0.25, 1], [-5, 0], [5, INFINITE], term=term)


CONVEX_ANSWER = np.log(4 / 3) + np.log(3) / 4


def convex_rows():
    """The same with x <= 0.5 hidden in a source."""
    source = Source(np.array([[1.0, 0.0]]), np.array([-INFINITE]), np.array([0.5]))
    return replace(convex(), sources=(source,))


def nothing():
    """No row, no cost."""
    return make_program([0, 0], [0, 0], [1, 1])


ANSWERS = {
    "box": (box, -6.0),
    "linear": (linear, -2.8),
    "polygon": (polygon, -np.sqrt(2)),
    "equality": (equality, 1.0),
    "fixed column": (fixed, 1.0),
    "convex term": (convex, CONVEX_ANSWER),
    "convex term and rows": (convex_rows, np.log1p(np.exp(-0.5)) + 0.125),
    "no cost": (nothing, 0.0),
}


def knapsack():
    """max 8 a + 11 b + 6 c + 4 d, 5 a + 7 b + 4 c + 3 d <= 14, binary: b, c, d; relaxed 22."""
    rows = [([5, 7, 4, 3], -INFINITE, 14)]
    return make_program([-8, -11, -6, -4], [0] * 4, [1] * 4, rows=rows, integer=[True] * 4)


def hidden_knapsack():
    row = knapsack().rows
    source = Source(row.matrix.toarray(), row.lower, row.upper)
    empty = Rows(sparse.csr_array((0, 4)), np.zeros(0), np.zeros(0))
    return replace(knapsack(), rows=empty, sources=(source,))


def convex_integer():
    """min t + x / 4 with t >= log(1 + exp(-x)), x integer: 1, between ln 3 and its neighbours."""
    return replace(convex(), integer=np.array([True, False]), blocks={"gate": slice(0, 1)})


INTEGER_ANSWERS = {
    "knapsack": (knapsack, -21.0),
    "hidden knapsack": (hidden_knapsack, -21.0),
    "convex integer": (convex_integer, np.log1p(np.exp(-1.0)) + 0.25),
}


def assert_answer(solution, answer):
    assert solution.objective == pytest.approx(answer, rel=ANSWER, abs=ANSWER)
    if solution.bound is not None:
        assert solution.bound <= answer + SOUND * max(1.0, abs(answer))
        assert solution.gap <= LIMITS.gap


def assert_feasible(program, point):
    whole = program.write_out() if program.sources else program
    values = whole.rows.matrix @ point
    assert np.all(program.lower - ANSWER <= point)
    assert np.all(point <= program.upper + ANSWER)
    assert np.all(whole.rows.lower - ANSWER <= values)
    assert np.all(values <= whole.rows.upper + ANSWER)
    assert np.all(point[program.term.columns] >= program.term.values(point) - ANSWER)
    assert np.allclose(point[program.integer], np.round(point[program.integer]), rtol=0, atol=ANSWER)


@pytest.mark.parametrize("case", ANSWERS)
@pytest.mark.parametrize("name", SOLVERS)
def test_known_answers(name, case):
    build, answer = ANSWERS[case]
    program = build()
    solution = find_solver(name).solve(program, LIMITS, ignore_progress)
    assert solution.status is Status.OPTIMAL
    assert not solution.interrupted
    assert_answer(solution, answer)
    assert_feasible(program, solution.point)
    assert solution.objective == pytest.approx(program.value(solution.point), rel=1e-12)
    assert set(solution.sizes) == {"columns", "rows", "rows_used", "gates", "cuts"}


@pytest.mark.parametrize("case", INTEGER_ANSWERS)
@pytest.mark.parametrize("name", SOLVERS)
def test_known_answers_in_integers(name, case):
    build, answer = INTEGER_ANSWERS[case]
    program, solver = build(), find_solver(name)
    if Capability.INTEGER not in solver.capabilities:
        with pytest.raises(SolverError, match="cannot solve programs with integer columns"):
            solver.solve(program, LIMITS, ignore_progress)
        return
    solution = solver.solve(program, LIMITS, ignore_progress)
    assert solution.status is Status.OPTIMAL
    assert_answer(solution, answer)
    assert_feasible(program, solution.point)
    assert solution.sizes["gates"] == program.integer.sum()


IMPOSSIBLE = {
    "rows": lambda: make_program([1, 1], [0, 0], [1, 1], rows=[([1, 1], 3, INFINITE)]),
    "two rows": lambda: make_program([0, 0], [-9, -9], [9, 9], rows=[([1, 1], 1, 1), ([2, 2], 3, 3)]),
    "source": lambda: make_program(
        [1, 1], [0, 0], [1, 1], sources=[Source(np.ones((1, 2)), np.array([3.0]), np.array([INFINITE]))]
    ),
    "free columns": lambda: make_program(
        [0, 0], [-INFINITE] * 2, [INFINITE] * 2, rows=[([1, -1], 1, 1), ([1, -1], 2, 2)]
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
@pytest.mark.parametrize("name", SOLVERS)
def test_impossible_programs(name, case):
    solution = find_solver(name).solve(IMPOSSIBLE[case](), LIMITS, ignore_progress)
    assert solution.status is Status.INFEASIBLE
    assert solution.point is None
    assert solution.objective is None
    assert solution.gap is None


@pytest.mark.parametrize("name", LOOPS)
def test_no_integer_fits(name):
    program = make_program([1], [0], [9], rows=[([2], 3, 3)], integer=[True])
    solution = find_solver(name).solve(program, LIMITS, ignore_progress)
    assert solution.status is Status.INFEASIBLE
    assert solution.point is None


@pytest.mark.parametrize("name", SOLVERS)
def test_programs_without_end(name):
    program = make_program([-1, 1], [0, 0], [INFINITE, 1], rows=[([1, -1], 0, INFINITE)])
    solution = find_solver(name).solve(program, LIMITS, ignore_progress)
    assert solution.status is Status.UNBOUNDED
    assert solution.point is None


@pytest.mark.parametrize("name", SOLVERS)
def test_no_time_at_all(name):
    """Without a start nothing is known; with one it is the answer."""
    limits = replace(LIMITS, time_limit=0.0)
    angles = 300
    started = time.monotonic()
    blind = find_solver(name).solve(polygon(angles), limits, ignore_progress)
    assert blind.status in ({Status.TIMED_OUT} if name in LOOPS else {Status.TIMED_OUT, Status.OPTIMAL})
    seeing = find_solver(name).solve(replace(polygon(angles), start=np.array([0.5, 0.5])), limits, ignore_progress)
    assert time.monotonic() - started < 2 * OVERTIME
    assert seeing.status in ({Status.FEASIBLE} if name in LOOPS else {Status.FEASIBLE, Status.OPTIMAL})
    assert seeing.objective <= -1.0
    if name in LOOPS:
        assert blind.point is None
        assert seeing.point.tolist() == [0.5, 0.5]
        assert seeing.bound <= -np.sqrt(2)


@pytest.mark.parametrize("name", LOOPS)
def test_only_the_rows_that_matter_are_built(name):
    program = polygon(400)
    solution = find_solver(name).solve(program, LIMITS, ignore_progress)
    assert solution.sizes["rows"] == 400
    assert 0 < solution.sizes["rows_used"] < 300
    built = program.sources[0].built
    assert len(built) == len(set(built)) == solution.sizes["rows_used"]


@pytest.mark.parametrize("name", LOOPS)
def test_cuts_are_counted(name):
    solution = find_solver(name).solve(convex(), LIMITS, ignore_progress)
    assert solution.sizes["cuts"] > 0
    assert solution.history[-1].cuts == solution.sizes["cuts"]


@pytest.mark.parametrize("name", LOOPS)
def test_the_tie_break_chooses_among_optima(name):
    """min x + y with x + y >= 1: a whole edge is optimal."""
    for tie_break, point in (([1.0, 0.0], [0, 1]), ([0.0, 1.0], [1, 0])):
        program = make_program(
            [1, 1], [0, 0], [1, 1], rows=[([1, 1], 1, INFINITE)], tie_break=np.array(tie_break), start=np.ones(2)
        )
        solution = find_solver(name).solve(program, LIMITS, ignore_progress)
        assert solution.status is Status.OPTIMAL
        assert solution.point == pytest.approx(point, abs=ANSWER)
        assert solution.gap <= LIMITS.gap


@pytest.mark.parametrize("name", LOOPS)
def test_a_start_is_improved_on(name):
    program = replace(knapsack(), start=np.zeros(4))
    solution = find_solver(name).solve(program, LIMITS, ignore_progress)
    assert solution.objective == pytest.approx(-21.0)
    objectives = [step.objective for step in solution.history if step.objective is not None]
    assert all(after <= before for before, after in pairwise(objectives))


@pytest.mark.parametrize("name", LOOPS)
def test_an_interrupt_keeps_the_best_so_far(name):
    def interrupt(step):
        raise KeyboardInterrupt

    for program, point in ((replace(knapsack(), start=np.zeros(4)), [0, 0, 0, 0]), (knapsack(), None)):
        solution = find_solver(name).solve(program, LIMITS, interrupt)
        assert solution.interrupted
        assert (None if solution.point is None else solution.point.tolist()) == point
        assert solution.status is (Status.TIMED_OUT if point is None else Status.FEASIBLE)


@pytest.mark.parametrize("name", LOOPS)
def test_the_same_program_gives_the_same_bits(name):
    for build in (polygon, knapsack, convex):
        one, other = (find_solver(name).solve(build(), LIMITS, ignore_progress) for _ in range(2))
        assert one.point.tobytes() == other.point.tobytes()
        assert one.objective == other.objective
        assert one.bound == other.bound


def test_every_solve_gets_its_own_seconds():
    """The clock of HiGHS runs on from solve to solve: seconds already spent must not be counted again."""
    generator = np.random.default_rng(0)
    rows = [(row, -INFINITE, 1.0) for row in generator.uniform(size=(400, 400))]
    engine = HighsEngine(make_program(-generator.uniform(size=400), [0] * 400, [9] * 400, rows=rows), LIMITS)
    first = engine.solve(60.0)
    assert first.outcome is Outcome.OPTIMAL
    spent = engine._highs.getRunTime()
    largest = int(np.argmax(first.point))
    unit = np.eye(400)[largest : largest + 1]
    engine.add_rows(Rows(sparse.csr_array(unit), np.array([-INFINITE]), np.array([first.point[largest] / 2])))
    assert engine.solve(0.9 * spent).outcome is Outcome.OPTIMAL


def test_no_presolve_begins_that_would_end_too_late(monkeypatch):
    program = knapsack()
    engine = HighsEngine(program, LIMITS)
    monkeypatch.setattr("critical_neurons.solvers.highs.DELAY", 1e3)
    monkeypatch.setattr("critical_neurons.solvers.highs.LARGE", 0)
    assert engine.solve(20.0).outcome is Outcome.STOPPED
    assert engine.solve_integer(20.0, 0.0, None, lambda bound, point: None).outcome is Outcome.STOPPED
    solution = find_solver("highs").solve(program, LIMITS, ignore_progress)
    assert solution.status in (Status.TIMED_OUT, Status.FEASIBLE)
    monkeypatch.undo()
    assert engine.solve(20.0).outcome is Outcome.OPTIMAL


def hard(seed=0, columns=60):
    """A market split of four rows: its relaxation says 0, and nobody finds out in a few seconds that it is not."""
    generator = np.random.default_rng(seed)
    weights = generator.integers(0, 100, size=(4, columns)).astype(np.float64)
    slack = np.hstack([np.eye(4), -np.eye(4)])
    half = np.floor(weights.sum(axis=1) / 2)
    rows = [(row, side, side) for row, side in zip(np.hstack([weights, slack]), half, strict=True)]
    total = columns + 8
    upper = [1.0] * columns + [INFINITE] * 8
    start = np.concatenate([np.zeros(columns), half, np.zeros(4)])
    integer = np.arange(total) < columns
    cost = np.concatenate([np.zeros(columns), np.ones(8)])
    return make_program(cost, [0.0] * total, upper, rows=rows, integer=integer, start=start)


@pytest.mark.parametrize("name", LOOPS)
def test_stopped_inside_an_integer_program(name):
    """What the branch and bound had found by then is not lost, and what it had proved neither."""
    program = hard()
    limits = replace(LIMITS, time_limit=0.7)
    for start in (program.start, None):
        solution = find_solver(name).solve(replace(program, start=start), limits, ignore_progress)
        assert solution.seconds < limits.time_limit + OVERTIME
        assert solution.status is Status.FEASIBLE
        assert solution.objective < 0.1 * program.value(program.start)
        assert solution.bound == pytest.approx(0.0, abs=ANSWER)
        assert_feasible(program, solution.point)


@pytest.mark.parametrize("name", LOOPS)
def test_a_real_interrupt_inside_an_integer_program(name):
    program = hard()
    limits = replace(LIMITS, time_limit=60.0)
    timer = threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT))
    started = time.monotonic()
    timer.start()
    solution = find_solver(name).solve(program, limits, ignore_progress)
    assert time.monotonic() - started < 1.0 + OVERTIME
    assert solution.interrupted
    assert solution.status is Status.FEASIBLE
    assert solution.objective < program.value(program.start)
    assert_feasible(program, solution.point)


@pytest.mark.parametrize("name", LOOPS)
def test_a_real_interrupt_inside_a_linear_program(name):
    """Large enough for seconds of simplex."""
    generator = np.random.default_rng(0)
    rows = [(row, -INFINITE, 1.0) for row in generator.uniform(size=(900, 900))]
    program = make_program(-generator.uniform(size=900), [0] * 900, [9] * 900, rows=rows, start=np.zeros(900))
    timer = threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    try:
        solution = find_solver(name).solve(program, LIMITS, ignore_progress)
    finally:
        timer.join()
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert solution.interrupted == (solution.status is Status.FEASIBLE)


@pytest.mark.parametrize("name", LOOPS)
def test_history_never_gets_worse(name):
    solution = find_solver(name).solve(hard(), replace(LIMITS, time_limit=0.3), ignore_progress)
    for before, after in pairwise(solution.history):
        assert after.seconds >= before.seconds
        assert after.objective <= before.objective
        assert before.bound is None or after.bound >= before.bound


@pytest.mark.parametrize("name", LOOPS)
def test_solves_in_threads_do_not_meet(name):
    solutions = []

    def solve():
        solutions.append(find_solver(name).solve(hard(), replace(LIMITS, time_limit=0.3), ignore_progress))

    threads = [threading.Thread(target=solve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [solution.status for solution in solutions] == [Status.FEASIBLE] * 2


@pytest.mark.parametrize("case", [*ANSWERS, *INTEGER_ANSWERS, *IMPOSSIBLE])
def test_first_order_takes_networks_only(case):
    """It says what it found, what it takes and what to use instead; the networks below are its conformance tests."""
    build = {**ANSWERS, **INTEGER_ANSWERS, **{name: (build, None) for name, build in IMPOSSIBLE.items()}}[case][0]
    with pytest.raises(InvalidSettingError, match=r"solver: first-order found .* Accepted: .* Use .*solver='highs'"):
        find_solver("first-order").solve(build(), LIMITS, ignore_progress)


def test_first_order_has_no_options():
    find_solver("first-order").check_options({})
    with pytest.raises(InvalidSettingError, match=r"options: first-order has none\. Found: no_such_thing"):
        find_solver("first-order").check_options({"no_such_thing": 1})


NETWORKS = ["mlp", "mlp of three hidden layers", "mlp without biases", "nest", "stride, padding and dilation"]


@cache
def solve_network(solver, network, *, integer):
    case = share_case(network)
    bounds = bound_network(case.network, case.inputs, radius=0.1)
    program = encode_paper(case.network, bounds, case.labels, Objective(), integer=integer)
    return find_solver(solver).solve(program, replace(LIMITS, gap=1e-5), ignore_progress)


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", [*SOLVERS[1:], "first-order"])
def test_solvers_agree_on_networks(name, network, integer):
    """On the objective; the scores may differ."""
    if integer and Capability.INTEGER not in find_solver(name).capabilities:
        pytest.skip(f"{name} takes no integer columns")
    expected = solve_network("highs", network, integer=integer)
    solution = solve_network(name, network, integer=integer)
    assert solution.status is expected.status is Status.OPTIMAL
    assert solution.objective == pytest.approx(expected.objective, rel=ANSWER, abs=ANSWER)


@pytest.mark.parametrize("network", ["max pool of a relu6", "overlapping max pool"])
def test_a_gap_finer_than_the_tangents_stays_open(network):
    """The last tangents leave more than this gap, and there is no integer column to go on with."""
    case = share_case(network)
    labels = case.network.forward(case.inputs).argmax(axis=1)
    bounds = bound_network(case.network, case.inputs)
    program = encode_paper(case.network, bounds, labels, Objective(loss_weight=10.0))
    assert not program.integer.any()
    solution = find_solver("highs").solve(program, replace(LIMITS, gap=1e-9), ignore_progress)
    assert solution.status is Status.FEASIBLE
    assert solution.bound < solution.objective <= solution.bound + ANSWER


OPTIONS = {
    "highs": ("mip_heuristic_effort", 0.2, "a lot"),
    "scip": ("separating/maxrounds", 3, "a lot"),
    "cvxpy:CLARABEL": ("tol_feas", 1e-9, "a lot"),
}


@pytest.mark.parametrize("name", SOLVERS)
def test_options_reach_the_solver(name):
    option, value, nonsense = OPTIONS[name]
    solver = find_solver(name)
    solution = solver.solve(convex(), replace(LIMITS, options={option: value}), ignore_progress)
    assert solution.status is Status.OPTIMAL
    assert_answer(solution, CONVEX_ANSWER)
    with pytest.raises(InvalidSettingError, match=f"{name}.*{option}.*a lot"):
        solver.check_options({option: nonsense})


@pytest.mark.parametrize("name", SOLVERS)
def test_unknown_options(name):
    solver = find_solver(name)
    solver.check_options({})
    with pytest.raises(InvalidSettingError, match=rf"options: {name}.*no_such_thing"):
        solver.check_options({"no_such_thing": 1})
    with pytest.raises(InvalidSettingError, match="no_such_thing"):
        solver.solve(convex(), replace(LIMITS, options={"no_such_thing": 1}), ignore_progress)


@pytest.mark.parametrize(
    ("name", "option", "setting"),
    [
        ("highs", "time_limit", "time_limit="),
        ("highs", "mip_rel_gap", "gap="),
        ("scip", "limits/time", "time_limit="),
        ("scip", "misc/catchctrlc", "Leave it out"),
        ("cvxpy:CLARABEL", "max_threads", "threads="),
    ],
)
def test_options_that_have_a_setting(name, option, setting):
    with pytest.raises(InvalidSettingError, match=f"{option} of {name} is set here already. .*{setting}"):
        find_solver(name).check_options({option: 1})


@pytest.mark.parametrize("name", LOOPS)
def test_an_option_that_ends_the_search(name):
    option = {"highs": "mip_max_nodes", "scip": "limits/nodes"}[name]
    solution = find_solver(name).solve(hard(), replace(LIMITS, options={option: 1}), ignore_progress)
    assert solution.status is Status.FEASIBLE
    assert not solution.interrupted
    assert solution.seconds < LIMITS.time_limit


@pytest.mark.parametrize("name", ["", "gurobi", "SCIP", "scip:", "cvxpy", "cvxpy:", "HIGHS", "cvxpy:NOBODY"])
def test_unknown_solvers(name):
    with pytest.raises(InvalidSettingError, match="solver: "):
        find_solver(name)


def test_rows_of_the_front_come_first_unless_they_are_hardly_violated():
    front, ends = ROWS_PER_ROUND // 2, np.array([ROWS_PER_ROUND // 2, 3 * ROWS_PER_ROUND])
    numbers = np.arange(ends[-1])
    violations = np.where(numbers < front, LEAST_VIOLATION + 0.1, np.linspace(0.9, 1.0, len(numbers)))
    chosen = _choose_front(numbers, violations, ends)
    assert chosen.tolist() == [*range(front), *numbers[-(ROWS_PER_ROUND - front) :]]
    violations[:front] = LEAST_VIOLATION / 2
    assert _choose_front(numbers, violations, ends).tolist() == numbers[-ROWS_PER_ROUND:].tolist()
