"""Scoring: one program per part, independent of the others; their scores put together into those of the network."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import critical_neurons as cn
from critical_neurons.batch import digest_rows, gather_batch
from critical_neurons.errors import InvalidInputError, UnreadableModelError
from critical_neurons.experiments.decoupled.parts import Decoupled, Part
from critical_neurons.network import Ints, Network
from critical_neurons.reading import copy_for_reading
from critical_neurons.spreading import Piece, Tell, hire
from critical_neurons.workers import HERE, Workers

BODY = "body."
"""What the names of the network's modules begin with in a part."""


def score_parts(
    decoupled: Decoupled,
    inputs: Any,
    labels: Any = None,
    *,
    score: Callable[..., cn.Scores] = cn.score,
    progress: Callable[[str, cn.Scores], None] = lambda name, scores: None,
    workers: Workers = HERE,
    threads: int = 1,
) -> cn.Scores:
    """Scores of the whole network: of each convolution by its part and head, of the classifier's hidden layers by the
    last part.

    Inputs and labels as for `cn.score`, but labels must be given. `score` is that or a `functools.partial` of it with
    other settings, which hold for every part, the time limit too. `parts` of what is returned keeps the scores of the
    parts, whose layers are called `body.` and the name in the network. `progress` is called with the name and scores
    of each part done.

    `workers` solve several parts at once, each on so many `threads`: the scores are the same for any workers.

    The paper's rows hold the head's ReLUs to their pattern, too, at every position, which leaves the maps in front of
    it hardly any room: expect scores near 1. `formulation="linearised"` has no rows, and tells maps apart.
    """
    started = time.monotonic()
    batch = gather_batch(inputs, labels)
    if batch.labels is None:
        raise InvalidInputError("labels: found none. Every head would take its own predictions; give the labels.")
    entering = torch.from_numpy(batch.inputs)
    network = cn.read_network(decoupled.model, entering)
    if not network.scored:
        raise InvalidInputError(f"the network has nothing to score:\n{network}")
    pieces: dict[str, Piece] = {}
    leaving = entering
    for part in decoupled.parts:
        ignored = _find_ignored(part, network, leaving)
        if ignored is not None:
            pieces[part.name] = partial(_score_part, score, part, leaving, batch.labels, ignored)
        leaving = run_to(part, leaving)
    found: dict[str, cn.Scores] = {}
    with hire(workers, most=len(pieces), threads=threads) as crew:
        for done in crew.run(pieces.items()):
            if done.error is not None:
                raise done.error
            found[done.name] = done.result
            progress(done.name, done.result)
    singles = [found[name] for name in pieces]
    settings = {
        **(singles[0].settings if singles else {}),
        "ignore": [],
        "inputs": digest_rows(batch.inputs),
        "input_shape": list(batch.inputs.shape[1:]),
        "decoupled": True,
    }
    return join_scores(network, singles, settings=settings, seconds=time.monotonic() - started)


def _score_part(
    score: Callable[..., cn.Scores], part: Part, entering: Tensor, labels: Ints, ignored: list[str], tell: Tell
) -> cn.Scores:
    return score(part.network, entering, labels, ignore=ignored)


def run_to(part: Part, entering: Tensor) -> Tensor:
    """What the next part reads: the body's output in evaluation mode and float64, as programs compute it."""
    with torch.no_grad():
        leaving: Tensor = copy_for_reading(part.body)(entering)
    return leaving


def join_scores(
    network: Network, singles: Sequence[cn.Scores], *, settings: dict[str, Any], seconds: float
) -> cn.Scores:
    """The scores of the parts as those of the network. They keep the worst status and the largest gap."""
    found = {name.removeprefix(BODY): values for single in singles for name, values in single.items()}
    wanted = [layer.name for layer in network.scored]
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
        layers=network.layers,
        groups=network.groups,
        holds=network.holds,
        wirings=network.wirings,
        fingerprint=network.fingerprint,
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
    )


def _find_ignored(part: Part, network: Network, entering: Tensor) -> list[str] | None:
    """The part's layers that get no scores: those of its head, and those the network leaves alone.

    None where nothing is left to score.
    """
    wanted = {BODY + layer.name for layer in network.scored}
    layers = cn.read_network(part.network, entering).layers
    if not any(layer.name in wanted and layer.scored for layer in layers):
        return None
    return [layer.name for layer in layers if layer.name not in wanted]
