"""Pipeline: the public steps around scoring and planning: a look before, a program solved, a model made smaller."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from critical_neurons.batch import gather_batch
from critical_neurons.errors import PlanMismatchError
from critical_neurons.network import Network
from critical_neurons.plans import Plan
from critical_neurons.program import Program
from critical_neurons.pruning import check_removal, hold_at_zero, remove_units
from critical_neurons.reading import copy_for_reading, fingerprint, read_network, unwrap
from critical_neurons.settings import as_names
from critical_neurons.solution import Solution, Step
from critical_neurons.solving import Limits, find_solver, ignore_progress


def inspect(model: nn.Module, example: Any, *, ignore: Collection[str] = ()) -> Network:
    """What would be scored and what would not, with reasons: print the result. `example` is a batch of inputs."""
    return read_network(model, torch.from_numpy(gather_batch(example).inputs), ignore=as_names(ignore))


def solve(
    program: Program,
    *,
    solver: str = "highs",
    time_limit: float = 300.0,
    gap: float = 1e-4,
    threads: int | None = None,
    seed: int = 0,
    solver_options: Mapping[str, Any] | None = None,
    progress: Callable[[Step], None] | None = None,
) -> Solution:
    """Solve a program of `encode`."""
    found, options = find_solver(solver), dict(solver_options or {})
    found.check_options(options)
    return found.solve(program, Limits(time_limit, gap, threads, seed, options), progress or ignore_progress)


def prune(model: nn.Module, plan: Plan, example: Any) -> nn.Module:
    """A new, smaller module without the units the plan removes; the given one stays as it is.

    `example` is a batch of inputs. On a few rows of it the smaller model is compared with the masked one in float64.
    """
    source = unwrap(model)
    _check_architecture(fingerprint(source).architecture, plan)
    rows = torch.from_numpy(gather_batch(example).inputs)[:4]
    network = read_network(source, rows)
    exact = copy_for_reading(source)
    check_removal(hold_at_zero(exact, plan), remove_units(exact, network, plan), rows)
    return remove_units(source, network, plan)


def mask(model: nn.Module, plan: Plan) -> nn.Module:
    """A copy of the model, of the same size, with the activations of the removed units held at zero."""
    source = unwrap(model)
    _check_architecture(fingerprint(source).architecture, plan)
    return hold_at_zero(source, plan)


def _check_architecture(architecture: str, plan: Plan) -> None:
    if architecture != plan.architecture:
        raise PlanMismatchError(
            "the plan was made for another network: names or shapes of the parameters differ from this model's. "
            "Score this model and plan anew."
        )
