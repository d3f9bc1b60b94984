"""Compression: the result of `compress` and `sweep`, which can be saved and reported."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isfunction, signature
from pathlib import Path
from typing import Any

from torch import nn

from critical_neurons.api.load import load
from critical_neurons.api.report import report
from critical_neurons.api.save import save
from critical_neurons.core.comparison import Comparison
from critical_neurons.core.curve import Curve
from critical_neurons.core.plan import Plan
from critical_neurons.core.scores import Scores
from critical_neurons.errors import InvalidFileError
from critical_neurons.io.checkpoint import read_results
from critical_neurons.removal.rows import Inputs
from critical_neurons.reports.content_assembly import TITLE

DATA, TOLD = ("model", "inputs", "labels", "test", "evaluate"), ("progress", "detail", "folder", "workers")
"""Arguments that a recorded call mentions only by name, and those it leaves out."""


@dataclass(frozen=True)
class Compression:
    """The smaller model, its plan and scores, and its comparison with the original. `compared_on` are the inputs of
    the comparison; `call` is the code that makes it again.

    >>> found = cn.compress(model, inputs, labels, units=0.5, effort="quick", onnx=False)
    >>> {name: len(kept) for name, kept in found.plan.kept.items()}
    {'0': 2, '3': 4, '5': 3}
    """

    model: nn.Module
    plan: Plan
    scores: Scores
    comparison: Comparison
    compared_on: Inputs | None = field(default=None, repr=False)
    call: str = ""

    def __repr__(self) -> str:
        return f"Compression({self.plan!r})"

    def __str__(self) -> str:
        return f"{self.plan.rule}\n{self.comparison}"

    def save(self, folder: str | os.PathLike[str], *, base_model: str | None = None, overwrite: bool = False) -> None:
        """Write everything into a folder, as `critical_neurons.save`; `load` and `report` read it."""
        save(
            self.model,
            folder,
            plan=self.plan,
            scores=self.scores,
            comparison=self.comparison,
            call=self.call,
            base_model=base_model,
            overwrite=overwrite,
        )

    def report(
        self,
        path: str | os.PathLike[str],
        *,
        class_names: Sequence[str] = (),
        title: str = TITLE,
        curve: Curve | None = None,
    ) -> None:
        """Write one page for a browser, as `critical_neurons.report`."""
        report(
            path,
            comparison=self.comparison,
            plan=self.plan,
            scores=self.scores,
            inputs=self.compared_on,
            class_names=class_names,
            title=title,
            curve=curve,
            call=self.call,
        )


def load_compression(folder: Path, model: nn.Module, compared_on: Inputs) -> Compression:
    """Read what `save` wrote; `model` is the original."""
    found = read_results(folder)
    if found.scores is None or found.comparison is None:
        raise InvalidFileError(f"{folder}: holds a network without its scores and comparison.")
    return Compression(load(folder, model), found.plan, found.scores, found.comparison, compared_on, found.call)


def write_call(function: Callable[..., Any], given: Mapping[str, Any]) -> str:
    """The code of a call with all arguments that differ from their defaults; data and functions only by name."""
    texts = []
    for name, parameter in signature(function).parameters.items():
        value = given[name]
        if name in DATA and value is not None:
            texts.append(name if parameter.kind is parameter.POSITIONAL_OR_KEYWORD else f"{name}={name}")
        elif name not in (*DATA, *TOLD) and value != parameter.default:
            texts.append(f"{name}={value.__name__ if isfunction(value) else repr(value)}")
    return f"cn.{function.__name__}({', '.join(texts)})"
