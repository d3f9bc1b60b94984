"""Tasks for workers, which import them from here."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from threadpoolctl import threadpool_info

import critical_neurons as cn
from critical_neurons.errors import InvalidInputError, MissingExtraError
from critical_neurons.parallel import find_allowed_threads


def count(name, steps, log, send):
    """Send a message at every step; write a line to the log at every start."""
    with Path(log).open("a") as file:
        file.write(f"{name} {os.getpid()}\n")
    for step in range(steps):
        send(step)
        time.sleep(0.05)
    return name, os.getpid()


def read_log(log):
    """Names and process ids of what was begun."""
    lines = Path(log).read_text().splitlines() if Path(log).exists() else []
    return [(name, int(pid)) for name, pid in map(str.split, lines)]


def count_until_stopped(log, send):
    try:
        while True:
            send("still there")
            time.sleep(0.05)
    except KeyboardInterrupt:
        Path(log).write_text("stopped")
        raise


def describe_threads(send):
    return torch.get_num_threads(), {pool["num_threads"] for pool in threadpool_info()}, find_allowed_threads()


def fail(send):
    raise InvalidInputError("labels: found none.")


def lack_extra(send):
    raise MissingExtraError("cvxpy", "cvxpy")


def stumble(send):
    raise ZeroDivisionError("a bug")


def end_process(send):
    os.kill(os.getpid(), signal.SIGKILL)


def score_class_by_class(model, inputs, labels, send):
    """The scores, objectives and bounds, without what differs from run to run."""
    scores = cn.score(model, inputs, labels, formulation=cn.ByClass(cn.Paper(integer=False)))
    proved = [(part.status.value, part.objective, part.bound) for part in scores.parts]
    return {name: values.tolist() for name, values in scores.items()}, proved
