"""The public `search`: the units that a smaller model of a given size needs most."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from critical_neurons.core.budget import Budget, Scope
from critical_neurons.core.distillation import Distillation
from critical_neurons.core.progress import Progress
from critical_neurons.core.scores import Scores
from critical_neurons.core.settings import Compensation, DistanceName, EffortName, OutputDistance
from critical_neurons.core.workers import HERE, Workers
from critical_neurons.parallel import open_executor_for_parts
from critical_neurons.readers import isolated
from critical_neurons.selection.budget_search import Search, SearchSettings


@isolated
def search(
    model: nn.Module,
    inputs: Any,
    *,
    units: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    scope: Scope = "layer",
    compensate: Compensation | Distillation = "least_squares",
    effort: EffortName = "standard",
    distance: DistanceName | OutputDistance = "auto",
    seed: int = 0,
    ignore: str | Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    round_to: int = 1,
    workers: Workers = HERE,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> Scores:
    """Search for the units to keep so that the outputs of the smaller model are nearest to the model's.

    Give one of `units`, `params` and `macs`: the share to keep at most; `units` of every layer or, with
    `scope="global"`, of all layers together. `cn.plan(scores)` keeps to that budget: units that stay have a score of
    at least 0.5. No labels are needed. `inputs` are about a thousand typical ones or more: a tensor or array, a tuple
    or dict of them for a model of several inputs, or an iterable of batches. Any model that runs on them will do.

    * `compensate`: as it will be given to `cn.prune`. With "least_squares" or "distil" units are eliminated one by
      one in each layer, always the one that refitting the others compensates best, by the error in the layers that
      read them, weighted by Fisher matrices. Otherwise gates on all units follow the gradient of the loss.
    * `effort`: "quick" treats every layer as if the others stayed whole; "standard" revises that once with the other
      layers smaller and refitted; "thorough" several times. The candidate whose decisions agree best with the model's
      is returned.
    * `distance`: how outputs are compared. "divergence" is that of class probabilities, for one output (batch,
      classes); "squares" are mean squared differences relative to the variance, summed over outputs; "auto" takes
      the divergence for a single output (batch, columns) with at most ten columns or at most half as many as an input
      has numbers, else squares: give "squares" for regression. A function `distance(outputs, wanted)` of the outputs
      of the smaller and the original model, nested as they are, returns a tensor with one number or one per input,
      differentiable in the first argument.
    * `ignore`: layers that lose nothing. `start`, `stop`: names of the first and the last layer that may lose units,
      or of modules that contain them; the budget is then a share of what lies between.
    * `round_to`: layers keep multiples of it where the budget allows. Give `cn.plan` the same.
    * `workers`: `cn.Workers(jobs=2)` shares batches and layers among processes, one thread each. Scores are those of
      a search on one thread, to the last bit, for any number of workers.

    The search is a heuristic: `objective` is the distance of the outputs, without a bound. With "least_squares"
    `layer_choices` has the least-squares error of each layer's choice, beyond what removals in other layers cost, and
    a lower bound for all choices of equally many units. `progress` receives a `cn.Progress`: the stage, how far it is
    and its time left. `search_history` of the scores has the course of the search.

    >>> scores = cn.search(model, inputs, units=0.5, effort="quick")
    >>> smaller = cn.prune(model, cn.plan(scores), inputs, compensate="least_squares")
    >>> smaller[0].out_channels
    2
    """
    budget = Budget(units=units, params=params, macs=macs, scope=scope)
    settings = SearchSettings(compensate, effort, distance, seed, ignore, start, stop, round_to)
    with open_executor_for_parts(workers) as executor:
        return Search(model, inputs, settings, progress=progress, executor=executor).find(budget)
