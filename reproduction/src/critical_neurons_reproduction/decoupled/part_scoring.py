"""Part scoring: one independent program per part; the scores of all parts form those of the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

import critical_neurons as cn
from critical_neurons.core.batch import digest_rows, gather_batch
from critical_neurons.core.bounds import Bounds
from critical_neurons.core.formulation import BoundsName, Formulation, FormulationName, as_formulation
from critical_neurons.core.network import Network
from critical_neurons.core.structure import Floats, Ints
from critical_neurons.core.workers import HERE, Workers
from critical_neurons.errors import InvalidInputError, InvalidSettingError, UnreadableModelError
from critical_neurons.formulations.bound_propagation import bound_network, bound_output
from critical_neurons.formulations.bound_propagation.interval import make_box
from critical_neurons.parallel import SendMessage, Task, open_executor
from critical_neurons.readers import copy_for_reading
from critical_neurons_reproduction.decoupled.parts import Decoupled, DecoupledPart

BODY, HEAD = "body.", "head."
"""Prefixes of module names in a part: modules of the network, modules of the head."""

BoxName: TypeAlias = Literal["image", "part"]


def score_parts(
    decoupled: Decoupled,
    inputs: Any,
    labels: Any = None,
    *,
    formulation: Formulation | FormulationName = "paper",
    score: Callable[..., cn.Scores] = cn.score,
    box: BoxName = "image",
    score_heads: bool = False,
    progress: Callable[[str, cn.Scores], None] = lambda name, scores: None,
    workers: Workers = HERE,
    threads: int = 1,
) -> cn.Scores:
    """Scores of the whole network. Each convolution is scored in the program of its part and head, the hidden
    layers of the classifier in that of the last part.

    Inputs, labels and formulation as for `cn.score`, but labels are required. `score` is `cn.score` or a
    `functools.partial` of it with other settings; they apply to every part, including the time limit. The field
    `parts` of the result holds the scores per part, with layer names prefixed by `body.`. `progress` is called with
    the name and scores of each finished part.

    * `box`: where the input box of a part comes from, if the formulation has an `input_radius`. "image", as in the
      authors' code: the box of that radius around the image, propagated through all earlier parts by interval
      arithmetic. "part": a box of that radius around the part's input. In both cases the part's input is the
      output of the earlier parts for the image.
    * `score_heads`: also score the head's convolution and hidden layer in the part's program, as the authors' code
      does. These scores are kept in `parts` only.
    * `workers` solve several parts in parallel, with `threads` threads each; the scores are the same for any workers.

    With the image's box few ReLUs are stable beyond the first parts: solve the relaxation (`integer=False`). With a
    small box, or none, nearly all are stable; the paper's constraints then fix the activation pattern of the head's
    ReLUs at every position as well, and scores stay near 1. `formulation="linearised"` has no such constraints, and
    its scores discriminate between feature maps.
    """
    started = time.monotonic()
    batch = gather_batch(inputs, labels)
    if batch.labels is None:
        raise InvalidInputError("labels: found none. Every head would use its own predictions; give the labels.")
    program = as_formulation(formulation)
    radius, method = _read_bounding(program, box)
    entering = torch.from_numpy(batch.inputs)
    network = cn.read_network(decoupled.model, entering)
    if not network.removable:
        raise InvalidInputError(f"the network has nothing to score:\n{network}")
    tasks: dict[str, Task] = {}
    leaving = entering
    ranges = make_box(batch.inputs, radius) if box == "image" and radius else None
    for part in decoupled.parts:
        ignored = _find_ignored(part, network, leaving, score_heads=score_heads)
        if ignored is not None:
            bound = None if ranges is None else partial(bound_network, radius=radius, box=ranges, method=method)
            tasks[part.name] = partial(_score_part, score, program, part, leaving, batch.labels, ignored, bound)
        if ranges is not None and part is not decoupled.parts[-1]:
            ranges = bound_output(cn.read_network(part.network, leaving, stop="body"), ranges, method=method)
        leaving = run_to(part, leaving)
    found: dict[str, cn.Scores] = {}
    with open_executor(workers, most=len(tasks), threads=threads) as executor:
        for done in executor.run(tasks.items()):
            if done.error is not None:
                raise done.error
            found[done.name] = done.result
            progress(done.name, done.result)
    singles = [found[name] for name in tasks]
    settings = {
        **(singles[0].settings if singles else {}),
        "ignore": [],
        "bounds_from": "program",
        "box": box,
        "score_heads": score_heads,
        "input_shape": list(batch.inputs.shape[1:]),
        "decoupled": True,
    }
    inputs = tuple(digest_rows(batch.inputs))
    return join_scores(network, singles, settings=settings, inputs=inputs, seconds=time.monotonic() - started)


def _read_bounding(formulation: Formulation, box: BoxName) -> tuple[float, BoundsName]:
    """Radius and method of the bounds."""
    if box not in get_args(BoxName):
        raise InvalidSettingError(f"box: found {box!r}. Accepted: {', '.join(map(repr, get_args(BoxName)))}.")
    method = "interval" if isinstance(formulation, cn.Linearised) else formulation.bounds
    if isinstance(method, Bounds):
        raise InvalidSettingError("bounds: found Bounds, but they differ by part. Accepted: 'interval', 'backward'.")
    return formulation.input_radius if isinstance(formulation, cn.Paper) else 0.0, method


def _score_part(
    score: Callable[..., cn.Scores],
    formulation: Formulation,
    part: DecoupledPart,
    entering: Tensor,
    labels: Ints,
    ignored: list[str],
    bound: Callable[[Network, Floats], Bounds] | None,
    send: SendMessage,
) -> cn.Scores:
    if bound is not None and isinstance(formulation, cn.Paper):  # only this formulation has a radius
        bounds = bound(cn.read_network(part.network, entering, ignore=ignored), entering.numpy())
        formulation = replace(formulation, bounds=bounds)
    return score(part.network, entering, labels, formulation=formulation, ignore=ignored)


def run_to(part: DecoupledPart, entering: Tensor) -> Tensor:
    """The input of the next part: the body's output in evaluation mode and float64, as in the programs."""
    with torch.no_grad():
        leaving: Tensor = copy_for_reading(part.body)(entering)
    return leaving


def join_scores(
    network: Network,
    singles: Sequence[cn.Scores],
    *,
    settings: dict[str, Any],
    inputs: tuple[str, ...],
    seconds: float,
) -> cn.Scores:
    """Combine the scores of the parts to scores of the network, with the worst status and the largest gap."""
    found = {
        name.removeprefix(BODY): values
        for single in singles
        for name, values in single.items()
        if name.startswith(BODY)
    }
    wanted = [layer.name for layer in network.removable]
    if set(found) != set(wanted):
        raise UnreadableModelError(
            f"the parts score {', '.join(found) or 'nothing'}, the network {', '.join(wanted)}. Every convolution "
            "needs a ReLU before the next one."
        )
    gaps = [single.gap for single in singles]
    known = [gap for gap in gaps if gap is not None]
    keys = dict.fromkeys(key for single in singles for key in single.sizes)
    return cn.Scores(
        values_by_layer={name: found[name] for name in wanted},
        structure=network.structure,
        status=max((single.status for single in singles), key=lambda status: status.rank),
        objective=None,
        bound=None,
        gap=max(known) if len(known) == len(gaps) else None,
        seconds=seconds,
        settings=settings,
        history=(),
        sizes={key: sum(single.sizes.get(key, 0) for single in singles) for key in keys},
        logit_error=max(single.logit_error for single in singles),
        notes=(*network.notes, f"decoupled: {len(singles)} programs, one per part"),
        parts=tuple(singles),
        inputs=inputs,
    )


def _find_ignored(part: DecoupledPart, network: Network, entering: Tensor, *, score_heads: bool) -> list[str] | None:
    """The part's layers to leave unscored: its head, unless `score_heads`, and layers the network cannot prune.

    None if the part has no layer to score.
    """
    wanted = {BODY + layer.name for layer in network.removable}
    layers = cn.read_network(part.network, entering).layers
    if not any(layer.name in wanted and layer.removable for layer in layers):
        return None
    if score_heads:
        wanted |= {layer.name for layer in layers if layer.name.startswith(HEAD)}
    return [layer.name for layer in layers if layer.name not in wanted]
