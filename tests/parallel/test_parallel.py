"""Parallel: a task gives the same result wherever it runs; finished tasks are kept when workers are lost."""

import os
import pickle
import shutil
import signal
import sys
from functools import partial

import joblib
import pytest

import critical_neurons as cn
from critical_neurons import errors
from critical_neurons.core.workers import HERE, Workers
from critical_neurons.errors import InvalidInputError, InvalidSettingError, MissingExtraError, WorkersError
from critical_neurons.parallel import open_executor
from critical_neurons.parallel.processes import count_slots
from tests import tasks
from tests.clusters import ROOT, Cluster, wait_until
from tests.zoo import first_or_slow

KINDS = ["this process", "processes", "cluster"]

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="processes are killed by signals")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """For tests that leave it as it is."""
    with Cluster(tmp_path_factory.mktemp("cluster"), workers=2) as found:
        yield found


@pytest.fixture
def workers(request, cluster):
    return {KINDS[0]: HERE, KINDS[1]: Workers(2), KINDS[2]: Workers(scheduler=cluster.address)}[request.param]


def list_counts(log, names="abcd", steps=3):
    return [(name, partial(tasks.count, name, steps, log)) for name in names]


@pytest.mark.parametrize("workers", KINDS, indirect=True)
def test_a_bug_ends_the_run(workers):
    with open_executor(workers, most=2) as executor, pytest.raises(ZeroDivisionError, match="a bug"):
        list(executor.run([("x", tasks.stumble), ("y", tasks.stumble)]))


@pytest.mark.parametrize("workers", KINDS, indirect=True)
class TestAllKinds:
    def test_every_piece_is_run_once_and_heard(self, workers, tmp_path):
        received = []
        with open_executor(workers, most=4, on_message=lambda name, step: received.append((name, step))) as executor:
            assert executor.slots == (1 if workers == HERE else 2)
            done = list(executor.run(list_counts(tmp_path / "log")))
            wait_until(lambda: len(received) == 12)
        assert sorted(each.name for each in done) == [*"abcd"]
        assert all(each.result[0] == each.name and each.error is None for each in done)
        assert (os.getpid() in {each.result[1] for each in done}) == (workers == HERE)
        assert sorted(name for name, _ in tasks.read_log(tmp_path / "log")) == [*"abcd"]
        for name in "abcd":
            assert [step for sender, step in received if sender == name] == [0, 1, 2]

    def test_pieces_are_drawn_when_there_is_a_slot(self, workers, tmp_path):
        drawn = []

        def draw():
            for each in list_counts(tmp_path / "log", "abcdef"):
                drawn.append(each[0])
                yield each

        with open_executor(workers, most=6) as executor:
            seen = [(done.name in drawn, len(drawn)) for done in executor.run(draw())]
        assert all(known for known, _ in seen)
        assert seen[0][1] < len(seen) == 6

    def test_every_piece_is_on_one_thread_and_so_is_its_solver(self, workers):
        with open_executor(workers, most=2) as executor:
            for done in executor.run([("a", tasks.describe_threads), ("b", tasks.describe_threads)]):
                assert done.result == (1, {1}, 1)

    def test_a_failure_is_that_of_one_piece(self, workers, tmp_path):
        with open_executor(workers, most=4) as executor:
            work = [("x", tasks.fail), ("y", tasks.lack_extra), *list_counts(tmp_path / "log", "ab")]
            done = {each.name: each for each in executor.run(work)}
        assert isinstance(done["x"].error, InvalidInputError)
        assert str(done["y"].error).endswith("pip install 'critical_neurons[cvxpy]'")
        assert [done[name].result[0] for name in "ab"] == ["a", "b"]

    def test_class_by_class(self, workers, digits_model):
        """To the last bit, in the order of the classes."""
        model, inputs, labels = digits_model
        reported = []
        found = cn.score(model, inputs, labels, formulation=cn.ByClass(workers=workers), progress=reported.append)
        alone = cn.score(model, inputs, labels, formulation=cn.ByClass())
        assert without_seconds(found) == without_seconds(alone)
        assert [part.settings["labels"][0] for part in found.parts] == [0, 1, 2]
        assert {step.label for step in reported} <= {0, 1, 2}
        assert all(step.classes == 3 and 0 <= step.done < 3 for step in reported)


@pytest.fixture(scope="module")
def digits_model():
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 3))
    return model, torch.rand(9, 6), torch.tensor([0, 1, 2] * 3)


def without_seconds(scores):
    parts = [without_seconds(part) for part in scores.parts]
    return {**scores.to_dict(), "seconds": None, "history": None, "parts": parts}


class TestProcesses:
    def test_together_they_keep_within_the_cores(self):
        cores = joblib.cpu_count()
        assert count_slots(1, 1) == 1
        assert count_slots(10**6, 1) == cores
        assert count_slots(10**6, cores + 1) == 1
        assert count_slots(cores, 2) == max(1, cores // 2)

    def test_a_process_that_is_killed(self, tmp_path):
        """What is finished has been given before."""
        with open_executor(Workers(2), most=3) as executor:
            work = [*list_counts(tmp_path / "log", "ab"), ("x", tasks.end_process)]
            dones = executor.run(work)
            assert next(dones).name in "ab"
            with pytest.raises(WorkersError, match="killed, or out of memory"):
                list(dones)


class TestCluster:
    def test_a_killed_worker_costs_its_piece(self, tmp_path):
        """Its task is run again elsewhere; all others once."""
        log = tmp_path / "log"
        with (
            Cluster(tmp_path, workers=2) as cluster,
            open_executor(Workers(scheduler=cluster.address), most=6) as executor,
        ):
            victim = cluster.workers[0].pid
            done = []
            for each in executor.run(list_counts(log, "abcdef", steps=20)):
                done.append(each)
                if len(done) == 1:
                    os.kill(victim, signal.SIGKILL)
        assert sorted(each.name for each in done) == [*"abcdef"]
        assert all(each.error is None for each in done)
        assert len(tasks.read_log(log)) in (6, 7)  # the victim may have been between two
        assert [each.result[1] for each in done[1:]].count(victim) <= 1

    def test_a_piece_that_kills_its_workers(self, tmp_path):
        """It fails, with a reason, and the others go on."""
        with (
            Cluster(tmp_path, workers=2, allowed_failures=0) as cluster,
            open_executor(Workers(scheduler=cluster.address), most=4) as executor,
        ):
            # The first that Dask sees fail is given up, so nothing else may be on that worker.
            done = [*executor.run([("x", tasks.end_process)]), *executor.run(list_counts(tmp_path / "log", "abc"))]
        assert [each.name for each in done[:1]] == ["x"]
        assert isinstance(done[0].error, WorkersError)
        assert "its worker ended in the middle" in str(done[0].error)
        assert sorted(each.result[0] for each in done[1:]) == [*"abc"]

    def test_a_lost_scheduler(self, tmp_path):
        with (
            Cluster(tmp_path, workers=1) as cluster,
            open_executor(Workers(scheduler=cluster.address), most=4) as executor,
        ):
            dones = executor.run(list_counts(tmp_path / "log"))
            assert next(dones).name == "a"
            cluster.scheduler.kill()
            with pytest.raises(WorkersError, match=r"tcp://.*: the scheduler was lost\. What is finished is kept"):
                list(dones)

    def test_what_is_given_up_stops(self, cluster, tmp_path):
        with open_executor(Workers(scheduler=cluster.address), most=2) as executor:
            work = [("x", partial(tasks.count_until_stopped, tmp_path / "stopped"))]
            for each in executor.run([*work, *list_counts(tmp_path / "log", "a")]):
                assert each.name == "a"
                assert not (tmp_path / "stopped").exists()
                break
        wait_until((tmp_path / "stopped").exists)
        assert cluster.count_workers() == 2

    def test_other_code_is_refused(self, tmp_path):
        """Of the same version by its name."""
        shutil.copytree(ROOT / "src", tmp_path / "src")
        (tmp_path / "src" / "critical_neurons" / "core" / "batch.py").open("a").write("\n# changed\n")
        with Cluster(tmp_path, workers=0) as cluster:
            cluster.start_worker(tmp_path / "src")
            workers = Workers(scheduler=cluster.address)
            message = r"worker tcp://.*: refused.*critical_neurons .*source .* where .*source .* is needed"
            with pytest.raises(WorkersError, match=message), open_executor(workers, most=1):
                pass

    @pytest.mark.slow
    def test_another_version_that_joins_later_ends_the_run(self, tmp_path):
        metadata = tmp_path / "newer" / "numpy-99.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 99.0\n")
        with (
            Cluster(tmp_path, workers=1) as cluster,
            open_executor(Workers(scheduler=cluster.address), most=100) as executor,
        ):
            dones = executor.run(list_counts(tmp_path / "log", map(str, range(100)), steps=1))
            assert next(dones).error is None
            cluster.start_worker(tmp_path / "newer")
            wait_until(lambda: cluster.count_workers() == 2)
            with pytest.raises(WorkersError, match=r"numpy 99\.0 where .* is needed\. Install the same"):
                list(dones)

    def test_more_threads_than_workers_have(self, cluster):
        message = "has 1 threads, where threads=2 asks for more. Start workers with --nthreads 2"
        workers = Workers(scheduler=cluster.address)
        with open_executor(workers, most=1, threads=2) as executor, pytest.raises(WorkersError, match=message):
            list(executor.run([("a", tasks.describe_threads)]))

    @pytest.mark.parametrize("address", first_or_slow("tcp://127.0.0.1:1", "nowhere", "http://127.0.0.1:1"))
    def test_no_answer(self, address, monkeypatch):
        monkeypatch.setattr("critical_neurons.parallel.dask_cluster.CONNECT_SECONDS", 0.5)
        message = f"scheduler: no answer from '{address}'.*Start one with: dask"
        with pytest.raises(WorkersError, match=message), open_executor(Workers(scheduler=address), most=1):
            pass

    def test_no_workers(self, tmp_path, monkeypatch):
        monkeypatch.setattr("critical_neurons.parallel.dask_cluster.WAIT_SECONDS", 0.5)
        message = r"has no workers, and none came.*Start some with: dask worker tcp"
        with (
            Cluster(tmp_path, workers=0) as cluster,
            pytest.raises(WorkersError, match=message),
            open_executor(Workers(scheduler=cluster.address), most=1),
        ):
            pass


def test_a_number_is_no_workers():
    with (
        pytest.raises(InvalidSettingError, match=r"workers: found 4\. Accepted: cn\.Workers\(jobs=4\)"),
        open_executor(4, most=1),
    ):
        pass


def test_all_errors_come_back_from_another_process():
    for name, kind in vars(errors).items():
        if not (isinstance(kind, type) and issubclass(kind, errors.CriticalNeuronsError)):
            continue
        error = kind("torch", "extra") if kind is MissingExtraError else kind(f"{name}: a reason.")
        back = pickle.loads(pickle.dumps(error))
        assert (type(back), str(back)) == (kind, str(error))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"jobs": 0}, "jobs: found 0. Accepted: a whole number of at least one"),
        ({"jobs": True}, "jobs: found True"),
        ({"jobs": 1.5}, "jobs: found 1.5"),
        ({"scheduler": ""}, "scheduler: found ''. Accepted: the address"),
        ({"scheduler": 8786}, "scheduler: found 8786"),
        ({"jobs": 2, "scheduler": "tcp://host:8786"}, "jobs: found 2 beside a scheduler"),
    ],
)
def test_bad_workers(given, message):
    with pytest.raises(InvalidSettingError, match=message):
        Workers(**given)
