"""The public `report`: comparison, plan, scores and provenance as one page for a browser."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from critical_neurons.core.answers import Change
from critical_neurons.core.comparison import Comparison
from critical_neurons.core.curve import Curve
from critical_neurons.core.files import check_writable, write_atomically
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.errors import InvalidInputError, InvalidSettingError
from critical_neurons.readers import isolated
from critical_neurons.removal.rows import count_rows, find_tensors, gather_inputs, take_rows
from critical_neurons.reports import assemble, render_page
from critical_neurons.reports.content_assembly import SWEPT_TITLE, TITLE
from critical_neurons.reports.pictures import MOST_PICTURES, draw_pictures

IMAGE_CHANNELS = (1, 3)
FEWEST_PIXELS = 4
"""Along either side; smaller inputs do not count as images."""


class Swept(Protocol):
    """What `sweep` returns."""

    @property
    def curve(self) -> Curve: ...


@isolated
def report(
    path: str | os.PathLike[str],
    *,
    comparison: Comparison | None = None,
    plan: Plan | None = None,
    scores: Scores | None = None,
    curve: Curve | Swept | None = None,
    inputs: Any = None,
    class_names: Sequence[str] = (),
    title: str = "",
    files: Mapping[str, str] | None = None,
    call: str = "",
) -> None:
    """Write a self-contained page about a smaller network to an .html file, which also works offline.

    Give at least one of `comparison`, `plan`, `scores` and `curve`, a sweep or its curve. The result of `compress`
    has a method `found.report(path)` with all that it knows. `inputs` are those of the comparison: if they are
    images, those whose prediction changed are shown. `class_names` are the names of classes 0, 1, 2 and so on;
    `files` are digests of files by name; `call` is the code that makes the same again.

    >>> cn.report("report.html", plan=plan, title="Half of the units")
    >>> from pathlib import Path
    >>> Path("report.html").read_text()[:15]
    '<!doctype html>'
    """
    swept: Any = getattr(curve, "curve", curve)
    given = {"comparison": comparison, "plan": plan, "scores": scores, "curve": swept}
    for (name, value), kind in zip(given.items(), (Comparison, Plan, Scores, Curve), strict=True):
        if value is not None and not isinstance(value, kind):
            accepted = "Curve, or what sweep returns" if kind is Curve else kind.__name__
            raise InvalidSettingError(f"{name}: found {type(value).__name__}. Accepted: {accepted}.")
    if isinstance(class_names, str):
        raise InvalidSettingError("class_names: found one text. Accepted: a sequence with the name of every class.")
    check_writable(path)
    answers = None if comparison is None else comparison.answers
    changes = () if answers is None else answers.changes[:MOST_PICTURES]
    pictures = {} if inputs is None else _picture(inputs, changes, 0 if comparison is None else comparison.inputs)
    content = assemble(
        comparison=comparison,
        plan=plan,
        scores=scores,
        curve=swept,
        title=title or (TITLE if swept is None or plan or comparison else SWEPT_TITLE),
        class_names=class_names,
        files=files,
        call=call or getattr(curve, "call", ""),
    )
    write_atomically(path, render_page(content, pictures).encode())


def _picture(inputs: Any, changes: Sequence[Change], count: int) -> dict[int, str]:
    """Pictures of the inputs whose prediction changed, by row; none if the inputs are not images."""
    rows = gather_inputs(inputs)
    if count_rows(rows) != count:
        raise InvalidInputError(
            f"inputs: found {count_rows(rows)}, the comparison was made on {count}. Give those of the comparison."
        )
    images = list(find_tensors(take_rows(rows, torch.tensor([each.row for each in changes], dtype=torch.long))))
    if len(images) != 1 or images[0].ndim != 4 or images[0].is_complex():
        return {}
    _, channels, *sides = images[0].shape
    if channels not in IMAGE_CHANNELS or min(sides) < FEWEST_PIXELS:
        return {}
    drawn = draw_pictures(images[0].cpu().numpy().astype(np.float64))
    return {each.row: picture for each, picture in zip(changes, drawn, strict=True)}
