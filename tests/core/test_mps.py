"""Writing: a program as an MPS or LP file that other solvers read."""

from __future__ import annotations

from dataclasses import replace

import highspy
import numpy as np
import pytest
from scipy import sparse

from critical_neurons.core.program import Rows, stack_rows
from critical_neurons.core.solution import Status
from critical_neurons.errors import OutputError
from critical_neurons.formulations.bound_propagation import bound_network
from critical_neurons.formulations.objective import Objective
from critical_neurons.formulations.paper import encode_paper
from critical_neurons.solvers import Limits, find_solver, ignore_progress
from tests.solvers.test_solvers import INFINITE, knapsack, make_program
from tests.zoo import share_case

READ_BACK = 1e-15
"""The lower end of a row with two ends is kept as a difference: it may be off in its last digit."""

SAME_OPTIMUM = 1e-6

LIMITS = Limits(gap=1e-5, time_limit=20.0, threads=1)


def mixed():
    """Every kind of row and bound, awkward numbers, a column in no row, an explicit zero, an entry given twice."""
    matrix = sparse.csr_array(
        (
            np.array([1 / 3, -2e-7 / 3, 1e9 / 7, 0.0, np.pi, 1.0, 1.0, -7.0, 0.1, 0.2]),
            (np.array([0, 0, 1, 1, 2, 3, 3, 4, 5, 5]), np.array([0, 1, 0, 2, 2, 3, 3, 1, 4, 0])),
        ),
        shape=(7, 6),
    )
    rows = Rows(
        matrix,
        np.array([1.0, -INFINITE, 0.1, 1 / 3, -0.3, -INFINITE, -INFINITE]),
        np.array([INFINITE, 0.1, 0.1, 2 / 3, 0.0, 1.0, INFINITE]),
    )
    program = make_program(
        [1 / 3, 0, -1e-7, 2, 0, 0],
        [-INFINITE, 0, -INFINITE, 0.1, -5, 2],
        [INFINITE, 1, -0.1, 0.1, INFINITE, INFINITE],
        integer=[False, True, False, False, True, True],
    )
    return replace(program, rows=rows, blocks={"score": slice(0, 2), "gate": slice(2, 5)})


def encode(name, **options):
    case = share_case(name)
    bounds = bound_network(case.network, case.inputs, radius=0.1)
    return encode_paper(case.network, bounds, case.labels, Objective(), **options)


def read_with_highs(path):
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    assert highs.readModel(str(path)) == highspy.HighsStatus.kOk
    return highs


def solve_with_highs(path):
    highs = read_with_highs(path)
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.run()
    assert highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return highs.getInfo().objective_function_value


def solve_with_scip(path):
    pyscipopt = pytest.importorskip("pyscipopt")
    model = pyscipopt.Model()
    model.hideOutput()
    model.readProblem(str(path))
    model.optimize()
    assert model.getStatus() == "optimal"
    return model.getObjVal()


READERS = {"highs": solve_with_highs, "scip": solve_with_scip}


def test_every_number_is_read_back(tmp_path):
    program = mixed()
    program.write(tmp_path / "model.mps")
    lp = read_with_highs(tmp_path / "model.mps").getLp()
    said = slice(0, 6)  # the last row has no end
    shape = (lp.num_row_, lp.num_col_)
    kind = sparse.csc_array if lp.a_matrix_.format_ == highspy.MatrixFormat.kColwise else sparse.csr_array
    read = kind((lp.a_matrix_.value_, lp.a_matrix_.index_, lp.a_matrix_.start_), shape=shape)
    assert np.array_equal(read.toarray(), program.rows.matrix.toarray()[said])
    assert np.array_equal(lp.row_upper_, program.rows.upper[said])
    assert lp.row_lower_ == pytest.approx(program.rows.lower[said], rel=READ_BACK)
    assert np.array_equal(lp.col_cost_, program.cost)
    assert np.array_equal(lp.col_lower_, program.lower)
    assert np.array_equal(lp.col_upper_, program.upper)
    assert [kind == highspy.HighsVarType.kInteger for kind in lp.integrality_] == program.integer.tolist()
    assert list(lp.col_names_) == ["score[0]", "score[1]", "gate[0]", "gate[1]", "gate[2]", "column[5]"]
    assert list(lp.row_names_) == [f"row[{row}]" for row in range(6)]


def test_scip_reads_the_same_columns(tmp_path):
    pyscipopt = pytest.importorskip("pyscipopt")
    program = mixed()
    program.write(tmp_path / "model.mps")
    model = pyscipopt.Model()
    model.hideOutput()
    model.readProblem(str(tmp_path / "model.mps"))
    columns = {column.name: column for column in model.getVars()}
    for name, lower, upper, integer in zip(
        program.column_names(), program.lower, program.upper, program.integer, strict=True
    ):
        column = columns[name]
        assert column.getLbOriginal() == max(lower, -model.infinity())
        assert column.getUbOriginal() == min(upper, model.infinity())
        assert (column.vtype() != "CONTINUOUS") == integer


def test_the_text(tmp_path):
    program = make_program(
        [1, -0.5], [0, 0], [1, INFINITE], rows=[([1, 2], -1, 4), ([0, 1], 0.1, INFINITE)], integer=[True, False]
    )
    program.write(tmp_path / "model.mps", rows=Rows(sparse.csr_array([[1.0, 1.0]]), np.ones(1), np.ones(1)))
    assert (tmp_path / "model.mps").read_text().splitlines() == [
        *("NAME critical_neurons", "ROWS", " N objective", " L row[0]", " G row[1]", " E learnt[0]"),
        *("COLUMNS", " MARKER 'MARKER' 'INTORG'"),
        *(" gate[0] objective 1.0", " gate[0] row[0] 1.0", " gate[0] learnt[0] 1.0"),
        " MARKER 'MARKER' 'INTEND'",
        *(" gate[1] objective -0.5", " gate[1] row[0] 2.0", " gate[1] row[1] 1.0", " gate[1] learnt[0] 1.0"),
        *("RHS", " RHS row[0] 4.0", " RHS row[1] 0.1", " RHS learnt[0] 1.0"),
        *("RANGES", " RANGES row[0] 5.0"),
        *("BOUNDS", " LO BOUNDS gate[0] 0.0", " UP BOUNDS gate[0] 1.0"),
        *(" LO BOUNDS gate[1] 0.0", " PL BOUNDS gate[1]", "ENDATA"),
    ]


def test_the_text_of_lp_files(tmp_path):
    program = make_program(
        [1, -0.5],
        [0, -INFINITE],
        [1, INFINITE],
        rows=[([1, 2], -1, 4), ([0, 1], 0.1, INFINITE)],
        integer=[True, False],
    )
    program.write(tmp_path / "model.LP")
    assert (tmp_path / "model.LP").read_text().splitlines() == [
        *("\\ critical_neurons", "Minimize", " objective: + 1.0 gate(0) - 0.5 gate(1)", "Subject To"),
        *(" row(0)_low: + 1.0 gate(0) + 2.0 gate(1) >= -1.0", " row(0)_high: + 1.0 gate(0) + 2.0 gate(1) <= 4.0"),
        *(" row(1): + 1.0 gate(1) >= 0.1", "Bounds", " 0.0 <= gate(0) <= 1.0", " gate(1) free"),
        *("General", " gate(0)", "End"),
    ]


def test_lp_files_keep_every_number(tmp_path):
    program = mixed()
    program.write(tmp_path / "model.lp")
    lp = read_with_highs(tmp_path / "model.lp").getLp()
    places = [list(lp.col_names_).index(name.replace("[", "(").replace("]", ")")) for name in program.column_names()]
    for read, given in ((lp.col_cost_, program.cost), (lp.col_lower_, program.lower), (lp.col_upper_, program.upper)):
        assert np.array_equal(np.array(read)[places], given)
    assert sorted(np.unique(lp.a_matrix_.value_)) == sorted(
        np.unique(program.rows.matrix.toarray()[program.rows.matrix.toarray() != 0])
    )


@pytest.mark.parametrize("name", ["model.txt", "model", "model.mps.gz"])
def test_other_endings_are_refused(name, tmp_path):
    with pytest.raises(OutputError, match=r"\.mps or \.lp"):
        knapsack().write(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["mps", "lp"])
@pytest.mark.parametrize("reader", READERS)
def test_an_integer_program_keeps_its_optimum(reader, suffix, tmp_path):
    knapsack().write(tmp_path / f"model.{suffix}")
    assert READERS[reader](tmp_path / f"model.{suffix}") == pytest.approx(-21.0, abs=SAME_OPTIMUM)


@pytest.mark.parametrize("integer", [True, False])
@pytest.mark.parametrize("name", ["mlp", "nest", "mlp without biases"])
@pytest.mark.parametrize(("reader", "suffix"), [("highs", "mps"), ("highs", "lp"), ("scip", "mps")])
def test_with_what_was_learnt_the_optimum_is_the_bound(reader, suffix, name, integer, tmp_path):
    program = encode(name, integer=integer)
    solution = find_solver("highs").solve(program, LIMITS, ignore_progress)
    assert solution.status is Status.OPTIMAL
    program.write(tmp_path / f"model.{suffix}", rows=solution.learnt)
    value = READERS[reader](tmp_path / f"model.{suffix}")
    slack = SAME_OPTIMUM * max(1.0, abs(solution.objective))
    assert solution.bound - slack <= value <= solution.objective + slack


def test_learnt_rows_are_those_that_were_counted():
    program = encode("mlp")
    solution = find_solver("highs").solve(program, LIMITS, ignore_progress)
    assert len(program.rows) + len(solution.learnt) == solution.sizes["rows_used"] + solution.sizes["cuts"]
    values = solution.learnt.matrix @ solution.point
    assert np.all(values >= solution.learnt.lower - SAME_OPTIMUM)
    assert np.all(values <= solution.learnt.upper + SAME_OPTIMUM)


@pytest.mark.slow
def test_large_programs_are_written_in_seconds(tmp_path):
    matrix = sparse.random_array((3000, 400), density=0.75, format="csr", rng=0)
    rows = Rows(matrix, np.full(3000, -INFINITE), np.ones(3000))
    program = replace(make_program(np.ones(400), [0] * 400, [1] * 400), rows=stack_rows([rows], 400))
    program.write(tmp_path / "model.mps")
    assert read_with_highs(tmp_path / "model.mps").getNumNz() == rows.matrix.nnz


def test_what_was_there_stays_when_writing_fails(tmp_path):
    with pytest.raises(OutputError, match="does not exist"):
        knapsack().write(tmp_path / "nowhere" / "model.mps")
    (tmp_path / "model.mps").mkdir()
    with pytest.raises(OutputError, match="is a directory"):
        knapsack().write(tmp_path / "model.mps")
