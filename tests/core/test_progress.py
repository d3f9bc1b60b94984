"""Progress names its stage and the time left, at the pace so far."""

import pickle

import pytest

from critical_neurons.core import progress
from critical_neurons.core.progress import Progress, Stage, show_time
from critical_neurons.core.search_history import MOST_KEPT, thin


@pytest.fixture
def clock(monkeypatch):
    """Its time is what the test says."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_the_time_left_is_at_the_pace_so_far(clock):
    reported = []
    stage = Stage(reported.append, "refitting")
    clock[0] += 50  # before anything was done
    for done in range(3):
        stage(done, 6)
        clock[0] += 2
    assert reported == ["refitting: 0 of 6", "refitting: 1 of 6, 10 s left", "refitting: 2 of 6, 8 s left"]
    assert [each.seconds_left for each in reported] == [None, 10, 8]


def test_a_deadline_comes_first(clock):
    reported = []
    stage = Stage(reported.append, "proving", deadline=107.0)
    stage(0, 100)
    clock[0] += 1
    stage(1, 100)
    assert [each.seconds_left for each in reported] == [7, 6]


def test_lines_are_pickled():
    reported = Progress("pricing layers", 3, 12, 95, "half way")
    again = pickle.loads(pickle.dumps(reported))
    assert (again, again.stage, again.done, again.total, again.seconds_left) == (
        reported,
        "pricing layers",
        3,
        12,
        95,
    )
    assert Progress("measuring") == "measuring"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.6, "1 min 0 s"), (125, "2 min 5 s"), (3720, "1 h 2 min")]
)
def test_times(seconds, text):
    assert show_time(seconds) == text


def test_thinning_keeps_both_ends():
    assert thin(range(5)) == (0, 1, 2, 3, 4)
    kept = thin(range(1000))
    assert (len(kept), kept[0], kept[-1]) == (MOST_KEPT, 0, 999)
