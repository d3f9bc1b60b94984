"""Tables: results as tables for the terminal, and as plain data for JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from torch import Tensor

    from critical_neurons.api.compression import Compression
    from critical_neurons.cli.digits import Demo, Removal
    from critical_neurons.core.comparison import Comparison
    from critical_neurons.core.curve import Curve
    from critical_neurons.core.plan import Plan
    from critical_neurons.core.scores import Scores
    from critical_neurons.core.stability import Stability
    from critical_neurons.core.structure import Structure
    from critical_neurons.removal.rows import Inputs


LABELS_SHOWN = 40
"""Labels listed one by one; for a larger batch their number per class is shown."""


ROUNDING = 1e-9
"""Tolerance for means of accuracies."""


LOW_SCORE = 0.1
"""The paper's threshold for fully connected networks."""


def describe_batch(inputs: Inputs, labels: Tensor | None) -> str:
    from critical_neurons.removal.rows import count_rows, find_tensors

    sizes = ["x".join(map(str, values.shape[1:])) or "one number" for values in find_tensors(inputs)]
    found = f"{count_rows(inputs)} inputs of shape {' and '.join(sizes)}"
    if labels is None:
        return f"{found}, without labels"
    if len(labels) <= LABELS_SHOWN:
        return f"{found}, labels {' '.join(map(str, labels.tolist()))}"
    counts = ", ".join(f"{count} of class {label}" for label, count in sorted(Counter(labels.tolist()).items()))
    return f"{found}: {counts}"


def report_structure(structure: Structure) -> RenderableType:
    table = make_table("Layer", "Kind", ">Channels", "Can be removed")
    for layer in structure.layers:
        table.add_row(
            layer.name,
            layer.kind,
            str(layer.size),
            structure.describe(layer) if layer.removable else f"no: {layer.reason}",
        )
    among = f"{len(structure.removable)} of {len(structure.layers)} layers"
    count = f"{structure.unit_count} units in {among} can be removed."
    return Group(table, Text(count), *list_notes(structure.notes))


def report_scores(scores: Scores) -> RenderableType:
    table = make_table("Layer", ">Units", ">Mean score", f">Below {LOW_SCORE}", ">Share")
    for name, values in scores.items():
        low = int((values < LOW_SCORE).sum())
        table.add_row(name, str(len(values)), f"{values.mean():.3f}", str(low), f"{low / len(values):.0%}")
    return Group(table, *describe_solve(scores), *list_notes(scores.notes))


def describe_solve(scores: Scores) -> list[Text]:
    sizes = scores.sizes
    if not sizes:  # searched: no program was solved, and none was stopped
        known = scores.objective is not None
        moved = f"; distance of the outputs from the original's: {scores.objective:.3g}" if known else ""
        return [Text(f"searched in {scores.seconds:.1f} s{moved}")]
    return [
        Text(f"{scores.status.value}: {scores.status.sentence}"),
        Text(
            f"objective {_number(scores.objective)}   bound {_number(scores.bound)}   gap {_percent(scores.gap)}   "
            f"{scores.seconds:.1f} s"
        ),
        Text(
            f"{sizes['columns']} columns, {sizes['rows_used']} of {sizes['rows']} rows used, {sizes['gates']} gates, "
            f"{sizes['cuts']} cuts; logits differ from the network's by {scores.logit_error:.1e}"
        ),
        *([Text(f"Lagrangian dual: {scores.dual}")] if scores.dual else []),
    ]


def report_plan(plan: Plan) -> RenderableType:
    table = make_table("Layer", ">Units", ">Kept", ">Removed", "Why")
    for layer in plan.layers:
        kept = len(plan.kept[layer.name])
        table.add_row(layer.name, str(layer.total), str(kept), str(layer.total - kept), layer.reason)
    return Group(table, Text(f"Rule: {plan.rule}"))


def report_stability(stability: Stability) -> RenderableType:
    headers = "Layer", ">Units", ">Off", ">On", ">Unstable", ">Undecided", ">Kept", ""
    return Group(make_table(*headers, rows=stability.rows), Text(stability.summary))


def report_change(rows: Sequence[tuple[str, str, str]]) -> RenderableType:
    """Rows of quantity, before, after."""
    return make_table("", ">Before", ">After", rows=rows)


def report_comparison(comparison: Comparison) -> RenderableType:
    table = make_table("", ">Before", ">After", ">Change", rows=comparison.rows)
    return Group(table, *map(Text, comparison.notes))


def report_curve(curve: Curve) -> RenderableType:
    headers = (f">{header.capitalize()}" if at else "Units by" for at, header in enumerate(curve.headers))
    return Group(make_table(*headers, rows=curve.rows), *list_notes(curve.notes))


def report_compression(found: Compression) -> RenderableType:
    return Group(
        report_plan(found.plan),
        Text(),
        report_comparison(found.comparison),
        Text(),
        *describe_solve(found.scores),
        *list_notes(found.scores.notes),
    )


def describe_parameters(before: int, after: int) -> tuple[str, str, str]:
    return "parameters", f"{before:,}", f"{after:,} ({after / before:.0%})"


def report_demo(demo: Demo, read_back: Mapping[str, float]) -> RenderableType:
    """The compression, random removals, and the accuracies of the networks read back."""
    table = make_table("Accuracy, test data", ">Searched", ">At random, mean", ">Lowest", ">Highest")
    for name, removal in (("without refitting", demo.plain), ("refitted", demo.refitted)):
        numbers = removal.searched, fmean(removal.random), min(removal.random), max(removal.random)
        table.add_row(name, *(f"{number:.1%}" for number in numbers))
    return Group(
        report_compression(demo.compression),
        Text(),
        table,
        Text(f"At random: as many units of every layer, {len(demo.plain.random)} times."),
        Text(f"Without refitting, units searched for that: {judge(demo.plain)}."),
        Text(f"Refitted: {judge(demo.refitted)}."),
        Text(
            f"Trained, searched and refitted on {len(demo.training[1])} digits, tested on {len(demo.test[1])} others."
            " No fine-tuning."
        ),
        Text(f"Read back: {', '.join(f'{name} {accuracy:.1%}' for name, accuracy in read_back.items())}."),
        Text(f"{demo.seconds:.1f} s in all, {demo.training_seconds:.1f} s of it training"),
    )


def judge(removal: Removal) -> str:
    """A difference from the mean of random removals counts if it exceeds their standard deviation."""
    difference, spread = removal.searched - fmean(removal.random), pstdev(removal.random)
    if abs(difference) <= spread + ROUNDING:
        verdict = "a tie"
    else:
        verdict = "ahead of chance" if difference > 0 else "behind chance"
    beaten = sum(each < removal.searched for each in removal.random)
    return f"{verdict}, {100 * difference:+.1f} points; better than {beaten} of {len(removal.random)} random removals"


def structure_to_dict(structure: Structure) -> dict[str, Any]:
    layers = [
        {
            "name": layer.name,
            "kind": layer.kind,
            "channels": layer.size,
            "removable": int((layer.units >= 0).sum()),
            "reason": layer.reason,
        }
        for layer in structure.layers
    ]
    groups = [
        {"layers": list(group.layers), "units": len(group), "blocks": group.blocks} for group in structure.groups
    ]
    return {"layers": layers, "groups": groups, "notes": list(structure.notes)}


def compression_to_dict(found: Compression) -> dict[str, Any]:
    return {
        "plan": found.plan.to_dict(),
        "scores": found.scores.to_dict(),
        "comparison": found.comparison.to_dict(),
    }


def demo_to_dict(demo: Demo, read_back: Mapping[str, float]) -> dict[str, Any]:
    return {
        **compression_to_dict(demo.compression),
        "without_refitting": asdict(demo.plain),
        "refitted": asdict(demo.refitted),
        "read_back": dict(read_back),
        "images": {"training": len(demo.training[1]), "test": len(demo.test[1])},
        "seconds": {"training": demo.training_seconds, "all": demo.seconds},
    }


def make_table(*headers: str, rows: Sequence[Sequence[str]] = ()) -> Table:
    """Columns whose header starts with > are right-aligned."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 3, 0, 0))
    for header in headers:
        table.add_column(header.removeprefix(">"), justify="right" if header.startswith(">") else "left")
    for row in rows:
        table.add_row(*row)
    return table


def list_notes(notes: Sequence[str]) -> list[Text]:
    return [Text(f"Note: {note}") for note in notes]


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3%}"
