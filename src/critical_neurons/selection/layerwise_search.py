"""Layerwise search: in which order to remove the units of every group when the layers that read them are refitted.

Units are chosen so that the outputs of the group's consumers change least, weighed by their Fisher matrices. In the
first round every group is treated with all other groups whole. A choice can then be carried out as a draft: a copy in
full size in which removed units are not read and all layers behind them are refitted. In the draft the inputs of
every consumer are those of the smaller network, and the choice in every group can be revised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from critical_neurons.core.scores import LayerChoice
from critical_neurons.core.structure import Bools, Group, Structure, Wiring
from critical_neurons.parallel import SERIAL, Executor, run_in_order
from critical_neurons.removal.copies import copy_sharing, copy_viewing
from critical_neurons.removal.refit.behind import list_stops, refit_behind
from critical_neurons.removal.refit.im2col import Weighted, from_matrix, to_matrix
from critical_neurons.removal.refit.stream import refit_modules
from critical_neurons.removal.remove import has_tensors, remove_units
from critical_neurons.removal.rows import Inputs, count_rows, take_outputs
from critical_neurons.selection.consumers import list_consumers, split_module
from critical_neurons.selection.distance import Distance
from critical_neurons.selection.elimination import Consumer, Elimination, eliminate, measure_error
from critical_neurons.selection.factorisation import take_root
from critical_neurons.selection.inverses import MOST_KEPT, Inverses
from critical_neurons.selection.lower_bound import bound_error, is_bounded
from critical_neurons.selection.statistics import CHOICE_ROW_LIMIT, gather_metrics, gather_moments
from critical_neurons.selection.trial_weights import Fitted, put_weights
from critical_neurons.selection.trials import Outputs, RemovalTrial, Sample, measure_trials
from critical_neurons.selection.view import View

LEAST_METRIC, MOST_METRIC = 64, 512
"""Limits on the number of inputs for Fisher matrices; each takes a forward and a backward pass."""

TEMPERATURE = 4.0
"""Softmax temperature for Fisher matrices."""

TRIED_SHARES = (0.5, 0.75)
"""Shares of a group's units removed in the trials that relate its error to the loss."""

LEAST_TRIED, MOST_TRIED = 16, 1024
"""Limits on the number of inputs of each trial."""

MOST_TRIED_BYTES = 2**29
"""Memory for the weights of trials that share a run of the whole model."""

MOST_MEASURED = 64
"""Inputs for the loss of a choice without a draft."""

MOST_BATCH, BATCH_NUMBERS, NUMBERS_PER_OUTPUT = 64, 2**28, 3
"""Batch size: at most about this many numbers (1 GB) in a pass with gradients, where every output of a layer counts
several times, since it is normalised and activated as well."""

Progress = Callable[[int, int], None]


class LayerwiseSearch:
    """`model` is on the CPU in evaluation mode and is not changed."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        inputs: Inputs,
        distance: Distance,
        *,
        seed: int = 0,
        fisher_share: float = 0.5,
        progress: Progress = lambda done, total: None,
        executor: Executor = SERIAL,
    ) -> None:
        self._model, self._structure, self._distance, self._seed = model, structure, distance, seed
        self._fisher_share, self._executor = fisher_share, executor
        self._consumers = list_consumers(structure, model)
        self._parts = {each.module: split_module(model.get_submodule(each.module), each) for each in self._consumers}
        numbers = sum(NUMBERS_PER_OUTPUT * len(each.outputs) * each.positions for each in structure.wirings)
        self._batch = max(min(MOST_BATCH, BATCH_NUMBERS // max(numbers, 1)), 1)
        self._moments, self._outputs = gather_moments(model, self._parts, inputs, self._batch, progress, executor)
        self._inputs, self._roots = inputs, WeakKeyDictionary[View, dict[str, list[Tensor]]]()
        generator = torch.Generator().manual_seed(seed)
        self._shuffled = torch.randperm(count_rows(inputs), generator=generator)  # data may be sorted by class

    @cached_property
    def whole(self) -> View:
        """The view of the original model."""
        squares = {name: [each.covariance for each in moments] for name, moments in self._moments.items()}
        missing: dict[str, list[Tensor | None]] = {name: [None] * len(parts) for name, parts in self._parts.items()}
        return View(
            self._model, np.ones(self._structure.unit_count + 1, dtype=bool), squares, missing, Inverses(squares)
        )

    def carry_out(self, stays: Bools, progress: Progress = lambda done, total: None) -> View:
        """The draft with only these units; `stays` has a last entry for NO_UNIT."""
        draft = copy_viewing(self._model)
        stops = list_stops(self._structure, stays, masked=True)
        squares, missing = dict(self.whole.squares), dict(self.whole.missing)

        def learn(name: str, found: Tensor, wrong: Tensor) -> None:
            if name in self._parts:
                parts = self._parts[name]
                squares[name] = [found[part.group, part.columns, part.columns].float() for part in parts]
                missing[name] = [wrong[part.group, part.columns] for part in parts]

        outputs = Outputs()
        refit_modules(
            self._model,
            draft,
            stops,
            self._inputs,
            "least_squares",
            progress,
            learn,
            outputs.add,
            limit=CHOICE_ROW_LIMIT,
        )
        inverses, judged = Inverses(squares, MOST_KEPT), self._compare(draft, self._shuffled, outputs)
        return View(draft, stays, squares, missing, inverses, *judged)

    def judge(self, stays: Bools, progress: Progress = lambda done, total: None) -> View:
        """As `carry_out`, but cheaper and without covariances, for the last choice. Every group keeps a unit."""
        if not has_tensors(self._model, self._structure):  # weights were parametrised before
            return self.carry_out(stays, progress)
        model, structure, inputs, outputs = self._model, self._structure, self._inputs, Outputs()
        smaller, finish = remove_units(model, structure, stays), outputs.add
        fitted = refit_behind(
            model, smaller, structure, stays, inputs, "least_squares", progress, finish=finish, limit=CHOICE_ROW_LIMIT
        )
        return View(fitted, stays, {}, {}, Inverses({}), *self._compare(fitted, self._shuffled, outputs))

    def order(self, view: View, progress: Progress = lambda done, total: None) -> list[Elimination]:
        """For every group the order of removal, and the error after each removal."""
        if self._executor.slots > 1:
            view.inverses.prepare(self._executor)
        found, groups = list[Elimination](), self._structure.groups
        progress(0, len(groups))
        maps = (iter(self._find_maps(group, view)) for group in groups)  # taken one by one, and then freed
        calls = (partial(eliminate, each, len(group), group.blocks) for each, group in zip(maps, groups, strict=True))
        for each in run_in_order(self._executor, calls):
            found.append(each)
            progress(len(found), len(groups))
        return found

    def price(
        self, found: Sequence[Elimination], passes: int, progress: Progress = lambda done, total: None
    ) -> list[Elimination]:
        """Scale the errors of every group by how far trial removals move the model's outputs.

        `passes` bounds the work of all trials together, in passes over all inputs. Trials of late layers cost less,
        since what comes before is not computed again.
        """
        groups = self._structure.groups
        count = passes * len(self._shuffled) // (len(TRIED_SHARES) * len(groups))
        rows = self._shuffled[: min(max(count, LEAST_TRIED), MOST_TRIED)]
        tried = [(*each, share) for each in zip(groups, found, strict=True) for share in TRIED_SHARES]
        sample = Sample(self._inputs, self._outputs, torch.split(rows, self._batch))
        draft, portions = copy_sharing(self._model), self._divide([group for group, _, _ in tried])
        ratios: list[float | None] = []
        for number, portion in enumerate(portions):
            report = partial(_report_portion, progress, number, len(portions))
            ratios += self._rate(tried[portion], draft, sample, report)
        priced = []
        for each, own in zip(found, _by_group(ratios), strict=True):
            worths = [ratio for ratio in own if ratio is not None]
            priced.append(Elimination(each.order, each.errors * (float(np.mean(worths)) if worths else 0.0)))
        return priced

    def _rate(
        self, tried: Sequence[tuple[Group, Elimination, float]], draft: nn.Module, sample: Sample, progress: Progress
    ) -> list[float | None]:
        """The loss per error of trials; None where nothing is removed."""
        trials = [self._try(*each) for each in tried]
        losses = measure_trials(draft, trials, sample, self._distance, progress, self._executor)
        pairs = zip(losses, trials, strict=True)
        return [float(loss) / trial.error if trial.error > 0 else None for loss, trial in pairs]

    def _divide(self, groups: Sequence[Group]) -> list[slice]:
        """Trials of these groups in portions whose weights fit into memory."""
        first, held, portions = 0, 0, []
        for place, group in enumerate(groups):
            modules = (self._model.get_submodule(wiring.module) for wiring in self._list_readers(group))
            size = sum(value.nbytes for module in modules for value in module.parameters())
            if held and held + size > MOST_TRIED_BYTES:
                portions.append(slice(first, place))
                first, held = place, 0
            held += size
        return [*portions, slice(first, len(groups))]

    def _try(self, group: Group, found: Elimination, share: float) -> RemovalTrial:
        """The removal of this share of a group's units."""
        gone = int(share * len(group)) // group.blocks * group.blocks
        error = float(found.errors[gone - 1]) if gone else 0.0
        stays = np.ones(self._structure.unit_count + 1, dtype=bool)
        stays[group.units[found.order[:gone].numpy()]] = False
        readers = self._list_readers(group) if error > 0 else []
        return RemovalTrial(error, {wiring.module: self._fit(wiring, stays) for wiring in readers})

    def measure(self, stays: Bools) -> float:
        """The loss on some inputs with only these units, consumers refitted with the original model's moments."""
        losing = [wiring for wiring in self._consumers if not stays[wiring.inputs].all()]
        draft = copy_sharing(self._model)
        with put_weights(draft, {wiring.module: self._fit(wiring, stays) for wiring in losing}):
            return self._compare(draft, self._shuffled[:MOST_MEASURED], Outputs())[0]

    def _compare(self, other: nn.Module, rows: Tensor, known: Outputs) -> tuple[float, float]:
        """The distance of another model's outputs for these rows, and `Distance.miss`."""
        known.complete(other, self._inputs, rows, self._batch, self._executor)
        found, wanted = known.join(), take_outputs(self._outputs, self._inputs, known.rows)
        return float(self._distance.measure(found, wanted)), self._distance.miss(found, wanted)

    def describe(
        self, view: View, stays: Bools, found: Sequence[Elimination] | None = None
    ) -> tuple[LayerChoice, ...]:
        """The error of every group's choice, with the other groups as in the view, and a lower bound on it. `found`:
        orders of removal in this view; they tell the errors of choices that follow them."""
        choices = []
        for place, group in enumerate(self._structure.groups):
            kept = torch.from_numpy(stays[group.units])
            error = None if found is None else found[place].find_error(kept)
            bound = None
            if error is None or is_bounded(self._count_columns(group)):
                maps = self._find_maps(group, view)
                error = measure_error(maps, kept) if error is None else error
                bound = bound_error(maps, len(group), int(kept.sum()), group.blocks)
            choices.append(LayerChoice(group.layers, error, bound))
        return tuple(choices)

    def _count_columns(self, group: Group) -> int:
        """How many columns read units of the group."""
        parts = (part for wiring in self._list_readers(group) for part in self._parts[wiring.module])
        return sum(int(np.isin(part.units, group.units).sum()) for part in parts)

    def _find_roots(self, view: View) -> dict[str, list[Tensor]]:
        """Roots of the Fisher matrix of every consumer, one per group of a convolution; computed once per view."""
        if view not in self._roots:
            count = min(max(int(self._fisher_share * len(self._shuffled)), LEAST_METRIC), MOST_METRIC)
            metrics = gather_metrics(
                view.model,
                list(self._parts),
                self._inputs,
                self._shuffled[:count],
                self._distance,
                self._batch,
                TEMPERATURE,
                self._seed,
                self._executor,
            )
            self._roots[view] = {}
            for name, parts in self._parts.items():
                metric, outputs = metrics.pop(name), {part.group: part.outputs for part in parts}
                self._roots[view][name] = [take_root(metric[each][:, each]) for each in outputs.values()]
        return self._roots[view]

    def _list_readers(self, group: Group) -> list[Wiring]:
        return [wiring for wiring in self._consumers if np.isin(wiring.inputs, group.units).any()]

    def _find_maps(self, group: Group, view: View) -> list[Consumer]:
        """The consumers of the group as linear maps of its units, refitted with the remaining units of others."""
        numbers, left = np.full(len(view.stays), -1), view.stays.copy()
        numbers[group.units], left[group.units] = np.arange(len(group)), True
        maps, roots = [], self._find_roots(view)
        for wiring in self._list_readers(group):
            name = wiring.module
            for number, part in enumerate(self._parts[name]):
                inside = torch.from_numpy(left[part.units])
                units = torch.from_numpy(numbers[part.units])[inside]
                free = (units >= 0).nonzero().flatten()
                if len(free):
                    inverse, weight = view.refit(name, number, part, inside)
                    felt = weight[free] @ roots[name][part.group]
                    own = inverse if len(free) == len(units) else inverse[free[:, None], free]
                    maps.append(Consumer(own, felt, units[free]))
        return maps

    @torch.no_grad()
    def _fit(self, wiring: Wiring, stays: Bools) -> Fitted:
        """Weights and bias refitted to the units that stay, with the original model's moments."""
        module = self._model.get_submodule(wiring.module)
        assert isinstance(module, Weighted)
        matrix = to_matrix(module, module.weight.detach()).clone()
        old = module.bias
        bias = old.detach().clone() if isinstance(old, Tensor) else module.weight.new_zeros(len(wiring.outputs))
        pairs = zip(self._parts[wiring.module], self._moments[wiring.module], strict=True)
        for number, (part, moments) in enumerate(pairs):
            gone, weight = torch.from_numpy(~stays[part.units]), part.weight
            fitted = self.whole.inverses.refit(wiring.module, number, weight, gone)
            matrix[part.group, part.columns] = fitted.to(matrix)
            bias[part.outputs] += (moments.mean.double() @ (weight - fitted)).to(bias)
        return Fitted(from_matrix(module, matrix), bias)


def _report_portion(progress: Progress, number: int, count: int, done: int, total: int) -> None:
    progress(number * total + done, count * total)


def _by_group(values: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """Values in runs of one per tried share, group by group."""
    size = len(TRIED_SHARES)
    return (values[first : first + size] for first in range(0, len(values), size))
