"""Distillation: train the smaller model, without labels, to reproduce the original's outputs on calibration inputs.

Batch norms keep their statistics. The learning rate is chosen on held-out inputs. The weights of the last step are
returned if they are better there than those before training; otherwise, and when training is interrupted, the best
of a few checks. Held-out inputs are too few to take the best in any case: on others the last is often better.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor, nn

from critical_neurons.core.deadline import TimeIsUp, check_time, until
from critical_neurons.core.distillation import Distillation
from critical_neurons.core.progress import Progress
from critical_neurons.errors import InvalidSettingError, first_line
from critical_neurons.removal.augmentation import Augmentation
from critical_neurons.removal.gradients import differentiate
from critical_neurons.removal.imitation import Aim, Imitation
from critical_neurons.removal.metrics import count_macs
from critical_neurons.removal.muon import Muon
from critical_neurons.removal.rows import Inputs, count_rows, is_whole, join_batches, match_model, take_rows
from critical_neurons.removal.seeding import seeded

HELD_OUT = 8
"""One in this many inputs is held out."""

MOST_HELD_OUT = 256

COPIED_ROWS = 64
"""Rows copied at once, to save memory."""

FEWEST_JUDGED = 128
"""Augmented inputs to measure the held-out loss on. If few inputs are held out, each is augmented several times."""

RATES = (1e-2, 3e-3, 1e-3)
"""Learning rates to try."""

TRIAL_SHARE = 0.03
"""Share of the steps and of the time for each trial."""

FEWEST_STEPS, MOST_STEPS = 800, 4000
WORK = 3e12
"""Default number of steps: as many as take this many multiply-adds in the original, within the limits."""

CHECKS = 8
"""How often the loss on held-out inputs is measured."""

STEP_COST = 4.0
"""Time of the first training step relative to a forward pass of both models; then steps are timed."""

WARM_UP = 0.1
"""Share of the steps in which the learning rate rises; then it falls to zero along a cosine."""

LAYOUTS = (torch.channels_last, torch.contiguous_format)

SAVED_BYTES = 2**30
"""Memory that a forward pass may use for gradients."""


def hold_out(inputs: Inputs, seed: int) -> tuple[Inputs, Inputs]:
    """Copies of the inputs to fit on and of the held-out inputs. Inputs that cannot be split are used for both."""
    if is_whole(inputs) or count_rows(inputs) == 1:
        return inputs, inputs
    shuffled = torch.randperm(count_rows(inputs), generator=torch.Generator().manual_seed(seed))
    count = min(max(len(shuffled) // HELD_OUT, 1), MOST_HELD_OUT)
    fitted = (take_rows(inputs, rows) for rows in torch.split(shuffled[count:], COPIED_ROWS))
    return join_batches(fitted), take_rows(inputs, shuffled[:count])


def distil(
    original: nn.Module,
    smaller: nn.Module,
    inputs: Inputs,
    held_out: Inputs,
    aim: Aim,
    *,
    augment: Augmentation,
    settings: Distillation,
    seed: int = 0,
    report: Callable[[Progress], None] = lambda progress: None,
) -> nn.Module:
    """A trained copy of the smaller model, or an unchanged one if training does not help on held-out inputs.

    The smaller model must not have been fitted on the held-out inputs, or it would seem better than it is.
    Ctrl-C ends the training early, like the time limit. torch's global random state is not changed.
    """
    report(Progress("preparing to distil"))
    began = time.monotonic()
    with torch.inference_mode(False), torch.enable_grad(), seeded(seed, original, smaller):
        try:
            with until(began + settings.seconds):
                pair = Imitation(original, smaller, aim)
                training = _Training(pair, inputs, held_out, augment, settings, began, report)
        except TimeIsUp:
            return copy.deepcopy(smaller)
        with suppress(KeyboardInterrupt):
            training.run()
        return training.best.put_into(copy.deepcopy(smaller))


class _Snapshot:
    """Weights at some step, and their loss on held-out inputs."""

    def __init__(self, model: nn.Module, loss: float) -> None:
        self.loss = loss
        self._values = [each.detach().clone() for each in model.parameters()]

    def put_into(self, model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for each, values in zip(model.parameters(), self._values, strict=True):
                each.copy_(values)
        return model


class _Training:
    def __init__(
        self,
        pair: Imitation,
        inputs: Inputs,
        held_out: Inputs,
        augment: Augmentation,
        settings: Distillation,
        began: float,
        report: Callable[[Progress], None],
    ) -> None:
        self._pair = pair
        self._inputs, self._held_out = (match_model(each, pair.smaller) for each in (inputs, held_out))
        self._augment, self._settings, self._report = augment, settings, report
        self._variants = math.ceil(FEWEST_JUDGED / count_rows(held_out))
        self._size = min(settings.batch_size, self._count_fitting())
        self._rates = RATES if settings.learning_rate is None else (settings.learning_rate,)
        self._steps = settings.steps or self._choose_steps()
        self._trial = math.ceil(TRIAL_SHARE * self._steps) if len(self._rates) > 1 else 0
        self._steps_left = self._steps + len(self._rates) * self._trial
        self._began, self._steps_done, now = began, 0, time.monotonic()
        self.best = self.first = _Snapshot(pair.smaller, self._measure())
        check = time.monotonic() - now
        self._end = began + settings.seconds - check  # the last step is followed by a check
        self._step_seconds = STEP_COST * check * self._size / ((1 + self._variants) * count_rows(held_out))
        if self._trial and TRIAL_SHARE * settings.seconds < self._step_seconds + check:
            self._rates, self._trial = RATES[1:2], 0

    def run(self) -> None:
        rate = self._rates[0]
        if self._trial:
            seconds = TRIAL_SHARE * self._settings.seconds
            found = {each: self._train(each, self._trial, 1, seconds) for each in self._rates}
            rate = min(self._rates, key=found.__getitem__)
        left = self._end - time.monotonic()
        if left > self._step_seconds:
            loss = self._train(rate, self._steps, CHECKS, left)
            if loss < self.first.loss:
                self.best = _Snapshot(self._pair.smaller, loss)

    def _descend(self, batch: Inputs) -> float:
        """Compute the loss and its gradient, which is stored with the weights."""
        for each in self._pair.weights:
            each.grad = None
        loss = self._pair.compute_loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach())

    def _train(self, rate: float, steps: int, checks: int, seconds: float) -> float:
        """Train from the initial weights, for one cycle of the learning rate. Returns the final held-out loss."""
        self.first.put_into(self._pair.smaller)
        optimiser = Muon(self._pair.weights)
        batches, began, checked, loss = self._draw_batches(), time.monotonic(), 0, math.inf
        for step in range(steps):
            now = time.monotonic()
            if not math.isfinite(differentiate(partial(self._descend, next(batches)))):
                return math.inf
            # the cycle ends with the time
            optimiser.step(rate * _cycle(max((step + 0.5) / steps, (time.monotonic() - began) / seconds)))
            self._step_seconds = max(self._step_seconds, time.monotonic() - now)
            done = max((step + 1) / steps, (time.monotonic() - began) / seconds)
            if time.monotonic() + self._step_seconds > self._end:
                done = 1.0
            if done * checks >= checked + 1:
                checked, loss = int(done * checks), self._measure()
                if loss < self.best.loss:
                    self.best = _Snapshot(self._pair.smaller, loss)
            self._report_progress()
            if done >= 1:
                break
        return loss

    def _report_progress(self) -> None:
        self._steps_done, self._steps_left = self._steps_done + 1, self._steps_left - 1
        spent, done = time.monotonic() - self._began, self._steps_done
        left = max(min(self._settings.seconds - spent, spent / done * self._steps_left), 0)
        fitting = round(left * done / spent) if spent else self._steps_left  # steps in the time that is left
        losses = f"held-out loss {self.best.loss:.3g} after {self.first.loss:.3g}"
        self._report(Progress("distilling", done, done + fitting, left, losses))

    def _draw_batches(self) -> Iterator[Inputs]:
        """Endless, of one size; every epoch in a new order. The rest of an epoch begins the next batch."""
        count = count_rows(self._inputs)
        size, rows = min(self._size, count), torch.randperm(count)
        while True:
            if len(rows) < size:
                rows = torch.cat([rows, torch.randperm(count)])
            yield self._augment(take_rows(self._inputs, rows[:size]))
            rows = rows[size:]

    def _measure(self) -> float:
        """The mean of the losses on held-out inputs, plain and augmented, with the same random numbers every time."""
        rows = torch.arange(count_rows(self._held_out))
        with seeded(0, self._pair.smaller):
            plain = self._judge(rows, lambda given: given)
            return (plain + self._judge(rows.repeat(self._variants), self._augment)) / 2

    def _judge(self, rows: Tensor, augment: Augmentation) -> float:
        total = 0.0
        for some in torch.split(rows, self._size):
            check_time()
            total += len(some) * self._pair.judge(augment(take_rows(self._held_out, some)))
        return total / len(rows)

    def _choose_steps(self) -> int:
        macs = count_macs(self._pair.original, self._inputs)
        return round(min(max(WORK / (self._size * max(macs, 1)), FEWEST_STEPS), MOST_STEPS))

    def _count_fitting(self) -> int:
        """The batch size that fits in memory, from a run on one input.

        Channels-last convolutions are faster, but not every forward pass supports them.
        """
        for layout in LAYOUTS:
            self._pair.lay_out(layout)
            try:
                return max(SAVED_BYTES // max(self._count_kept(), 1), 1)
            except RuntimeError as error:
                failure = error
        raise InvalidSettingError(
            f"compensate: 'distil' cannot train this model ({first_line(failure)}). Take 'least_squares'."
        ) from failure

    def _count_kept(self) -> int:
        """Bytes kept for gradients, for one input."""
        own, kept = {each.data_ptr() for each in self._pair.smaller.parameters()}, 0

        def count(values: Tensor) -> Tensor:
            nonlocal kept
            kept += 0 if values.data_ptr() in own else values.numel() * values.element_size()
            return values

        with torch.autograd.graph.saved_tensors_hooks(count, lambda values: values):
            loss = self._pair.compute_loss(self._augment(take_rows(self._inputs, torch.arange(1))))
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise InvalidSettingError(
                "compensate: 'distil' follows the gradient of the distance between outputs, and here there is none. "
                "Give a differentiable loss=, of one number, or take 'least_squares'."
            )
        loss.backward()  # type: ignore[no-untyped-call]
        return kept


def _cycle(done: float) -> float:
    """The learning rate relative to the highest."""
    if done < WARM_UP:
        return done / WARM_UP
    return 0.5 + 0.5 * math.cos(math.pi * min((done - WARM_UP) / (1 - WARM_UP), 1.0))
