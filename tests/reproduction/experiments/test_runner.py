"""Running: every kind of cell end to end; what is done stays done, and what fails is named."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import critical_neurons
from critical_neurons.core.workers import Workers
from critical_neurons.errors import InvalidInputError, InvalidSettingError, MissingExtraError, OutputError
from critical_neurons.parallel.threads import on_threads
from critical_neurons_reproduction.experiments.cells import QUICK, TABLES, WHOLE, Schedule, list_cells
from critical_neurons_reproduction.experiments.runner import (
    RUNNERS,
    Reference,
    find_measured,
    find_references,
    find_work,
    run_cells,
)
from critical_neurons_reproduction.store import Store
from critical_neurons_reproduction.training import CHECKPOINT
from tests.zoo import first_or_slow

SOME_OF_EVERY_TABLE = [
    ("table-1", "fashion/sim"),
    ("table-1", "mnist/imidp"),
    ("table-1-appendix", "fashion/idp"),
    ("table-2", "mnist/fc3"),
    ("table-2-deep", "paper/share/ours"),
    ("table-2-given", "linearised/share/ours"),
    ("parts", "linearised"),
    ("parts", "heads-four-times-as-wide-as-their-input"),
    ("parts-narrow", "box-around-the-part-input/threshold/random"),
    ("replay", "buffer-10"),
    ("table-3", "mnist/fashion/lenet5"),
    ("table-3", "cifar10/mnist/vgg16"),
    ("snip", "ours"),
    ("snip", "snip"),
    ("snip-transfer", "mnist/fashion/ours"),
    ("snip-transfer", "mnist/fashion/snip"),
    ("rescale", "mnist/paper/rescale-0"),
    ("batches", "fashion/lenet5/batch-07"),
    ("training", "fashion/fc3/plain"),
    ("training", "fashion/fc3/incremental"),
    ("lambda", "lambda-0.25"),
    ("differences", "fc3/integer-gates"),
]

LONG = {
    *(
        "paper/share/ours",
        "box-around-the-part-input/threshold/random",
        "heads-four-times-as-wide-as-their-input",
        "fashion/fc3/plain",
        "fashion/fc3/incremental",
    ),
    *("mnist/imidp", "fashion/idp", "cifar10/mnist/vgg16", "mnist/fashion/ours"),
    *("mnist/fashion/snip", "mnist/paper/rescale-0", "fashion/lenet5/batch-07", "fc3/integer-gates"),
}
"""Much like another one, or minutes of work put together: VGG-16."""

SHARES = {"units", "as_published", "parameters"}
REMOVAL = {"threshold", "accuracy", "biases_left", "L1", "L2", *SHARES}
COMPARISON = {"rule", "random", "critical", "fine_tuned", *REMOVAL}
SOLVER = {"status", "objective", "gap", "seconds", "logit_error", "scores"}
COMMON = {"seconds", "test_images"}
PARTS = {"reference", "accuracy", "solver", "threshold", "mean_score", "below", *SHARES, *COMMON}
FIELDS = {
    "removal": {"reference", "solver", "removals", *COMMON},
    "comparison": {"reference", "solver", "removals", *COMMON},
    "decoupled": {"removed", "fine_tuned", *PARTS},
    "transfer": {"reference", "accuracy", "solver", *SHARES, *COMMON},
    "epochs": {"epochs", *COMMON},
    "given": {"removed", "fine_tuned", *PARTS},
    "parts": PARTS,
    "replay": {"accuracy", "losses", "threads", *COMMON},
}
MEASURED = {
    "mean_score",
    "below",
    "reference",
    "accuracy",
    "biases_left",
    "random",
    "critical",
    "L1",
    "L2",
    "fine_tuned",
    *SHARES,
}
"""What is a share, wherever it stands."""

DATA = Path(os.environ.get("DATA", Path(__file__).parents[3] / ".." / "shared" / "data"))


def find_shares(value, name=""):
    match value:
        case dict():
            for key, each in value.items():
                yield from find_shares(each, key)
        case list():
            for each in value:
                yield from find_shares(each, name)
        case int() | float() if name in MEASURED:
            yield value


def check_result(record):
    """Complete and plain, all shares in [0, 1]."""
    result, kind = record.result, record.cell.settings["kind"]
    assert json.loads(json.dumps(result)) == result
    assert result.keys() == FIELDS[kind]
    for removal in result.get("removals", []):
        assert removal.keys() == (REMOVAL if kind == "removal" else COMPARISON)
    for epoch in result.get("epochs", []):
        assert epoch.keys() == {"epoch", "reference", "accuracy", "units", "as_published", "solver"}
    if result.get("solver"):
        assert result["solver"].keys() == SOLVER
        assert all(0 <= least <= mean <= most <= 1 for least, mean, most in result["solver"]["scores"].values())
    shares = list(find_shares(result))
    assert len(shares) >= (1 if kind == "replay" else 4)
    assert all(0 <= share <= 1 for share in shares)
    assert result["seconds"] > 0


def without_seconds(result):
    solver = result.get("solver") and {k: v for k, v in result["solver"].items() if k != "seconds"}
    return {**result, "seconds": None, "solver": solver}


class Interrupted(Exception):
    pass


class Listener:
    """Records epochs and finished cells, and may interrupt the run."""

    def __init__(self, *, stop_at=None):
        self.epochs, self.finished, self.stop_at = [], [], stop_at

    def on_epoch(self, training, done, total):
        self.epochs.append((training, done))
        if self.stop_at == (training, done):
            raise Interrupted

    def finish(self, name):
        self.finished.append(name)
        if self.stop_at == name:
            raise Interrupted


@pytest.mark.parametrize(
    ("table", "only"),
    [pytest.param(*each, marks=pytest.mark.slow if each[1] in LONG else ()) for each in SOME_OF_EVERY_TABLE],
)
def test_cells_run_end_to_end(finish, table, only):
    check_result(finish(table, only))


def test_every_table_and_kind_is_among_them(find):
    cells = [cell for table, only in SOME_OF_EVERY_TABLE for cell in find(table, only)]
    assert {cell.table for cell in cells} == {*TABLES}
    assert {cell.settings["kind"] for cell in cells} == {*RUNNERS}
    methods = {cell.settings.get("method") for cell in cells}
    assert methods == {None, "scores", "units", "connections"}


class TestWhatIsDone:
    """With two cells of one network, which is trained for them, and one of another."""

    @pytest.fixture
    def cells(self, find):
        return [*find("snip", "snip"), *find("lambda", "lambda-0.25"), *find("table-1", "mnist/sim")]

    def test_is_not_done_again(self, cells, runs, tmp_path):
        first, second = Listener(), Listener()
        own, store = replace(runs, folder=tmp_path / "runs"), Store(tmp_path / "results")
        assert run_cells(cells, store, replace(own, on_epoch=first.on_epoch), finished=first.finish) == []
        names = [f"{cell.table} {cell.name}" for cell in cells]
        assert first.finished == ["fashion/lenet5/seed-0", "mnist/lenet5/seed-0", *names]
        trained = {what for what, _ in first.epochs}
        assert trained == {"fashion/lenet5/seed-0", "mnist/lenet5/seed-0", f"cells/{cells[0].key}"}
        before = {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()}
        assert run_cells(cells, store, replace(own, on_epoch=second.on_epoch), finished=second.finish) == []
        assert (second.epochs, second.finished) == ([], [])
        assert {path.name: path.read_bytes() for path in (tmp_path / "results").iterdir()} == before

    @pytest.mark.slow
    def test_an_interrupted_run_goes_on(self, cells, runs, store, tmp_path):
        """In the middle of a training, then between two cells; the results are those of a run in one go."""
        own, results = replace(runs, folder=tmp_path / "runs"), Store(tmp_path / "results")
        last = runs.schedule.epochs
        name = f"{cells[0].table} {cells[0].name}"
        listeners = []
        for stop_at in (("fashion/lenet5/seed-0", 2), name, None):
            listener = Listener(stop_at=stop_at)
            listeners.append(listener)
            recorded = replace(own, on_epoch=listener.on_epoch)
            if stop_at is None:
                assert run_cells(cells, results, recorded, finished=listener.finish) == []
            else:
                with pytest.raises(Interrupted):
                    run_cells(cells, results, recorded, finished=listener.finish)
        assert listeners[0].epochs == [("fashion/lenet5/seed-0", 1), ("fashion/lenet5/seed-0", 2)]
        assert listeners[1].epochs[: last - 2] == [("fashion/lenet5/seed-0", each) for each in range(3, last + 1)]
        assert listeners[2].epochs == []
        assert listeners[2].finished == [
            "fashion/lenet5/seed-0",
            "mnist/lenet5/seed-0",
            *(f"{cell.table} {cell.name}" for cell in cells[1:]),
        ]
        assert run_cells(cells, store, runs) == []
        for cell in cells:
            assert without_seconds(results.find(cell).result) == without_seconds(store.find(cell).result)

    def test_an_interrupted_solve_is_no_result(self, find, runs, tmp_path, monkeypatch):
        """`cn.score` itself would leave the best so far."""

        def stop(step):
            raise KeyboardInterrupt

        whole = critical_neurons.score
        monkeypatch.setattr(
            critical_neurons, "score", lambda *inputs, **settings: whole(*inputs, progress=stop, **settings)
        )
        results = Store(tmp_path)
        for only in ("lambda-5", "lambda-0.1"):
            with pytest.raises(KeyboardInterrupt):
                run_cells(find("lambda", only), results, runs)
        with pytest.raises(KeyboardInterrupt):
            run_cells(find("table-1", "mnist/idp"), results, runs)
        assert not list(tmp_path.iterdir())

    @pytest.mark.slow
    def test_is_the_same_for_any_number_of_jobs_and_threads(self, cells, runs, store, tmp_path):
        """To the last bit, also where torch is left with more threads than one."""
        listener = Listener()
        own, results = (
            replace(runs, folder=tmp_path / "runs", on_epoch=listener.on_epoch),
            Store(tmp_path / "results"),
        )
        with on_threads(2):
            assert run_cells(cells, results, own, workers=Workers(2), finished=listener.finish) == []
        assert run_cells(cells, store, runs) == []
        for cell in cells:
            assert without_seconds(results.find(cell).result) == without_seconds(store.find(cell).result)
        numbers = [done for what, done in listener.epochs if what == "mnist/lenet5/seed-0"]
        assert numbers == list(range(1, runs.schedule.epochs + 1))
        assert len(listener.finished) == 2 + len(cells)

    def test_of_quick_cells_and_others_is_kept_apart(self, cells, runs, store):
        assert run_cells(cells[:1], store, runs) == []
        (whole,) = (cell for cell in list_cells("snip", seeds=[0]) if cell.name == cells[0].name)
        (shortened,) = (
            cell for cell in list_cells("snip", seeds=[0], schedule=runs.schedule) if cell.name == cells[0].name
        )
        assert store.find(cells[0]) is not None
        assert store.find_best(whole, shortened) == [None, None]


class TestFailures:
    def test_a_cell_that_fails_does_not_stop_the_others(self, find, runs, tmp_path):
        """So few validation images that the imbalanced batches cannot be drawn."""
        few = replace(runs.schedule, measured=8)
        cells = [*find("table-1", "mnist/imidp", schedule=few), *find("table-1", "mnist/sim", schedule=few)]
        store, own = Store(tmp_path / "results"), replace(runs, folder=tmp_path / "runs", schedule=few)
        (failure,) = run_cells(cells, store, own)
        failed = "mnist/lenet5/imidp/balanced/seed-0"
        assert failure.startswith(f"table-1 {failed}: per_class: 10 images of every class requested")
        done = {cell.name for cell in cells if store.find(cell)}
        assert done == {cell.name for cell in cells} - {failed}
        assert run_cells(cells, store, own) == [failure]

    @pytest.mark.parametrize("jobs", first_or_slow(1, 2))
    def test_a_checkpoint_of_another_network(self, find, runs, tmp_path, jobs):
        """It is named, once, and stays as it is; cells of other networks are run."""
        runs.train_reference("fc3", "mnist", 0)
        (foreign,) = runs.folder.rglob(f"mnist/fc3/seed-0/{CHECKPOINT}")
        own, store = replace(runs, folder=tmp_path / "runs"), Store(tmp_path / "results")
        place = own.folder / foreign.relative_to(runs.folder).parent.parent.parent / "lenet5" / "seed-0" / CHECKPOINT
        place.parent.mkdir(parents=True)
        place.write_bytes(foreign.read_bytes())
        failing, fine = *find("table-1", "mnist/sim"), *find("snip", "snip")
        failures = run_cells([failing, fine], store, own, workers=Workers(jobs))
        reason = (
            f"{place}: comes from another training, which differs in network, initial weights. Give another folder"
        )
        (failure,) = failures
        assert failure.startswith(f"mnist/lenet5/seed-0: {reason}")
        assert place.read_bytes() == foreign.read_bytes()
        assert store.find(failing) is None
        assert store.find(fine) is not None

    @pytest.mark.parametrize("jobs", first_or_slow(1, 2))
    def test_results_that_cannot_be_written_end_the_run(self, find, runs, tmp_path, jobs):
        """A link into a folder that is gone; what is done in other files stays."""
        (tmp_path / "results").mkdir()
        (tmp_path / "results" / "snip.jsonl").symlink_to(tmp_path / "gone" / "snip.jsonl")
        store, (done,), cells = Store(tmp_path / "results"), find("lambda", "lambda-0.25"), find("snip")
        assert run_cells([done], store, runs) == []
        listener = Listener()
        with pytest.raises(OutputError, match=r"snip\.jsonl: the result cannot be written"):
            run_cells([done, *cells], store, runs, workers=Workers(jobs), finished=listener.finish)
        assert listener.finished == ["fashion/lenet5/seed-0"]
        assert store.find(done) is not None

    @pytest.mark.parametrize("missing", ["fashion_mnist", None])
    def test_missing_data_are_found_before_anything_is_trained(self, find, runs, blocks, tmp_path, missing):
        folder = tmp_path / "data"
        if missing:
            folder.mkdir()
            (folder / "mnist").symlink_to(blocks / "mnist")
        listener, (cell,) = Listener(), find("table-3", "mnist/fashion")
        own = replace(runs, folder=tmp_path / "runs", data=folder, on_epoch=listener.on_epoch)
        with pytest.raises(InvalidInputError, match=r"--data .*data: no .*To fetch this one: hf download zalando"):
            run_cells([cell], Store(tmp_path / "results"), own)
        assert listener.epochs == []
        assert not own.folder.exists()

    def test_data_that_are_no_pictures_are_named(self, find, runs, tmp_path, monkeypatch):
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hugging_face")
        (tmp_path / "data" / "mnist").mkdir(parents=True)
        own = replace(runs, folder=tmp_path / "runs", data=tmp_path / "data", cache=tmp_path / "cache")
        with pytest.raises(InvalidInputError, match="mnist: cannot be loaded as a data set"):
            run_cells(find("table-1", "mnist/sim"), Store(tmp_path / "results"), own)
        assert not own.folder.exists()

    def test_other_pictures_than_those_of_the_cells_are_refused(self, find, runs, blocks, tmp_path):
        """As a copy that went through JPEG: Fashion-MNIST in the place of MNIST."""
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "mnist").symlink_to(blocks / "fashion_mnist")
        own = replace(runs, folder=tmp_path / "runs", data=tmp_path / "data")
        with pytest.raises(InvalidInputError, match=r"mnist: not the images of ylecun/mnist.*JPEG"):
            run_cells(find("table-1", "mnist/sim"), Store(tmp_path / "results"), own)
        assert not own.folder.exists()

    @pytest.mark.parametrize("schedule", [WHOLE, QUICK, Schedule(epochs=3, narrow=32)])
    def test_cells_of_another_schedule(self, find, runs, store, schedule):
        """Their results would be taken for what they are not."""
        with pytest.raises(InvalidSettingError, match=r"fc3/seed-0: listed for .*, to be run by 4 of 30 epochs, VGG"):
            run_cells(find("table-2", "mnist/fc3", schedule=schedule), store, runs)

    def test_missing_extra(self, find, runs, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "threadpoolctl", None)
        with pytest.raises(MissingExtraError, match=r"threadpoolctl is not .*critical_neurons\[reproduce\]"):
            run_cells(find("snip"), Store(tmp_path), runs)


def test_nothing_to_do(runs, store):
    assert run_cells([], store, runs) == []


@pytest.mark.parametrize(
    ("table", "only", "names"),
    [
        ("table-2", "mnist/fc3", ["mnist/fc3/seed-0"]),
        ("table-3", "cifar10/mnist/vgg16", ["cifar10/vgg16/seed-0", "mnist/vgg16/seed-0"]),
        ("snip-transfer", "fashion/ours", ["fashion/lenet5/seed-0"]),
        ("training", "mnist/fc3/plain", ["mnist/fc3/seed-0"]),
        ("training", "mnist/fc3/incremental", []),
        ("table-2-given", "paper/share/random", []),
        ("table-2-deep", "paper/share/random", ["cifar10/vgg16/seed-0"]),
        ("parts-narrow", "linearised/share/random", ["cifar10/vgg16/narrow-4/seed-0"]),
    ],
)
def test_what_cells_begin_with(find, runs, tmp_path, table, only, names):
    (cell,) = find(table, only)
    found = list(find_references(cell, replace(runs, scores=tmp_path), None))
    assert [each.name for each in found] == names
    assert all(isinstance(each, Reference) for each in found)


def test_a_network_that_table_2_has_measured_is_not_trained_again(find, runs, tmp_path):
    store = Store(tmp_path)
    (cell,), (known,) = find("table-3", "mnist/fashion/lenet5"), find("table-2", "fashion/lenet5")
    assert find_measured(cell, store) is None
    for other in (replace(known, schedule="another"), replace(known, settings={**known.settings, "seed": 1})):
        store.add(other, {"reference": 0.5})
        assert find_measured(cell, store) is None
    store.add(known, {"reference": 0.75})
    assert find_measured(cell, store) == 0.75
    assert [each.name for each in find_work([cell], store, runs)[0]] == ["mnist/lenet5/seed-0"]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the paper's data sets are not there; give their folder as DATA")
def test_the_quick_profile_of_all_tables(runs, tmp_path):
    tables = [table for table in TABLES if table != "table-2-given"]  # its weights are of the whole width
    cells = [cell for table in tables for cell in list_cells(table, seeds=[0], profile="quick", schedule=QUICK)]
    store = Store(tmp_path / "results")
    own = replace(runs, folder=tmp_path / "runs", data=DATA, schedule=QUICK, cache=tmp_path / "cache")
    assert run_cells(cells, store, own, workers=Workers(2)) == []
    for cell in cells:
        check_result(store.find(cell))
