"""The public `compress`: from a model and inputs to a smaller model, compared with the original."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import nn

from critical_neurons.api.calibration import gather_data, gather_test
from critical_neurons.api.compare import compare
from critical_neurons.api.compress_task import PAPER, CompressTask
from critical_neurons.api.compression import Compression, write_call
from critical_neurons.api.plan import check_drop
from critical_neurons.core.batch import check_classes
from critical_neurons.core.budget import Budget
from critical_neurons.core.distillation import Distillation, split_compensation
from critical_neurons.core.formulation import Formulation, FormulationName, as_formulation, check_together
from critical_neurons.core.progress import Progress
from critical_neurons.core.settings import Compensation, DistanceName, EffortName, OutputDistance
from critical_neurons.core.solver import Solver, as_solver
from critical_neurons.core.workers import HERE, Workers
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.io.latency import Stopwatch
from critical_neurons.readers import isolated
from critical_neurons.removal.metrics import count_classes
from critical_neurons.removal.refit.stream import check_inputs
from critical_neurons.selection.budget_search import SearchSettings
from critical_neurons.selection.plan_rules import check_counts, check_keep
from critical_neurons.structure import find_structure


@isolated
def compress(
    model: nn.Module,
    inputs: Any,
    labels: Any = None,
    *,
    units: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    latency: float | None = None,
    max_drop: float | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    compensate: Compensation | Distillation | None = None,
    effort: EffortName = "standard",
    distance: DistanceName | OutputDistance = "auto",
    test: tuple[Any, Any] | None = None,
    keep: str | Collection[str] = (),
    min_units: int = 1,
    round_to: int = 1,
    paper: bool = False,
    formulation: Formulation | FormulationName | None = None,
    solver: Solver | str | None = None,
    ignore: str | Collection[str] = (),
    start: str | None = None,
    stop: str | None = None,
    seed: int = 0,
    onnx: bool = True,
    workers: Workers = HERE,
    progress: Callable[[str], None] = lambda text: None,
    detail: Callable[[Progress], None] = lambda progress: None,
) -> Compression:
    """Search, plan, prune, compensate and compare in one call, for any model.

    `inputs` are a tensor or array, a tuple or dict of them for a model of several inputs, or an iterable of batches.
    Labels are given beside them or in the batches, or not at all: regression, segmentation, detection and
    autoencoders need none.

    Give one of `units`, `params`, `macs` and `latency`, the share to keep at most, or `max_drop`, the accuracy that
    may be lost: then as many multiply-adds as possible are removed. `latency` is the time of one input on one thread,
    in onnxruntime if the model can be exported and unless `onnx=False`, else in torch: layers are timed at several
    widths, and the smaller model is timed beside the original until it meets the share. A drop is judged by
    `evaluate`, a function of a model, or by the accuracy on held-out inputs.

    Units are chosen by `search`, and the remaining weights refitted by `compensate="least_squares"`, both on all
    inputs; `effort`, `distance` and `workers` are those of `search`. `compensate="distil"` then trains the smaller
    model for some minutes, as `prune` explains; with `max_drop`, every candidate. It is the default with
    `effort="thorough"` and no `max_drop`. Two other ways to choose units:

    * `paper=True`: by the paper's scores, `score` with relaxed gates, input_radius=1e-5, the authors' objective and
      λ = 5, on one correctly classified input per class if there is one. The best-scored units that the share allows
      stay, and nothing is refitted unless `compensate` is given.
    * `formulation`, as for `score`: by the scores of that program under the budget, on a few inputs, evenly from all
      classes; `max_drop` starts from half of the removable multiply-adds. With `paper` it replaces the paper's
      formulation, and there is no budget.

    `solver`, as for `score`, solves the program of either. `keep`, `min_units` and `round_to` are those of `plan`;
    `ignore`, `start` and `stop` those of `score`.

    The comparison is made on `test`, a pair (inputs, labels) that was not used before; without it on the inputs, and
    labelled so. Labels are needed for accuracies, for `max_drop` without `evaluate`, and for programs. `progress`
    receives the name of each step, `detail` how far it is and the time left, as a `cn.Progress`. Ctrl-C during
    solving, the rounds of a search, the search for `max_drop` and distillation leaves the best result so far, with
    which the remaining steps are done.

    >>> test = test_inputs, test_labels
    >>> found = cn.compress(model, inputs, labels, macs=0.5, test=test, effort="quick", onnx=False)
    >>> found.comparison.after.macs <= 0.5 * found.comparison.before.macs
    True
    """
    given = dict(locals())  # before anything is added to it
    if sum(value is not None for value in (units, params, macs, latency, max_drop)) != 1:
        raise InvalidSettingError("compress: give one of units=, params=, macs=, latency= and max_drop=.")
    budget = None
    if max_drop is None:
        budget = Budget(units=units, params=params, macs=macs, latency=latency)
    else:
        check_drop(max_drop)
    if compensate is None:
        distilled = effort == "thorough" and max_drop is None
        compensate = "none" if paper else "distil" if distilled else "least_squares"
    settings = SearchSettings(compensate, effort, distance, seed, ignore, start, stop, round_to)
    check_counts(min_units=min_units)
    program = _choose_program(formulation, paper=paper)
    if program is None and solver is not None:
        raise InvalidSettingError(
            "solver: only for a program, but units are chosen by a search. Give paper=True or formulation=, or leave "
            "it out."
        )
    if program is not None and workers != HERE:
        raise InvalidSettingError(
            "workers: only for a search. For a program give formulation=cn.ByClass(workers=...)."
        )
    if program is not None and latency is not None:
        raise InvalidSettingError("latency: needs a search. Leave out paper= and formulation=, or give macs=.")
    if program is not None:
        check_together(program, None if paper else budget, settings.span)
    solved_by = Solver(seed=seed) if solver is None else as_solver(solver)
    data = gather_data(inputs, labels)
    if data.labels is None and (program is not None or (max_drop is not None and evaluate is None)):
        raise InvalidInputError(
            "labels: none. Give the index of the right class of every input. They can be left out where units are "
            "searched for and max_drop= is judged by evaluate=."
        )
    tested = None if test is None else gather_test(test, data)
    used, judge, judged_on = data, evaluate, None
    if max_drop is not None and evaluate is None:
        used, held_out = data.hold_out(seed)
        judge, judged_on = held_out.measure_accuracy, held_out.inputs
    if program is None or compensate != "none":
        check_inputs(used.inputs, held_out=int(split_compensation(compensate)[1] is not None))
    structure = find_structure(model, used.inputs, ignore=settings.ignore)
    for each in (data, tested):
        if each is not None and each.labels is not None:
            check_classes(each.labels, count_classes(model, each.inputs))
    task = CompressTask(
        model,
        structure,
        used,
        budget=budget,
        settings=settings,
        planned={"keep": check_keep(keep, structure.layers), "min_units": min_units, "round_to": round_to},
        max_drop=max_drop,
        evaluate=judge,
        judged_on=judged_on,
        stopwatch=None if latency is None else Stopwatch(model, used.inputs, onnx=onnx),
        workers=workers,
        progress=progress,
        detail=detail,
    )
    found, scores = task.search() if program is None else task.score(program, solved_by, paper=paper)
    progress("Removing and refitting" if compensate != "none" else "Removing")
    smaller = task.carry_out(found)
    progress("Comparing")
    measure = partial(compare, model, smaller, onnx=onnx, progress=lambda what: detail(Progress(f"Measuring {what}")))
    if tested is None:
        comparison = measure(data.inputs, data.labels, data="calibration")
    else:
        comparison = measure(tested.inputs, tested.labels, calibration=data.inputs)
    compared_on = data.inputs if tested is None else tested.inputs
    return Compression(smaller, found, scores, comparison, compared_on, write_call(compress, given))


def _choose_program(formulation: Formulation | FormulationName | None, *, paper: bool) -> Formulation | None:
    """None if units are searched for."""
    if formulation is None:
        return PAPER if paper else None
    return as_formulation(formulation)
