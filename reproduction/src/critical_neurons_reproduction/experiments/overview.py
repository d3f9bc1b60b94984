"""Overview: the first table of the page, every row of the paper's tables beside ours, and why rows fall short."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from critical_neurons.core.markdown import format_table
from critical_neurons_reproduction.result_tables import MISSING, Figure, Row, Table

LEGEND = """\
Every entry is accuracy / share of the parameters removed, as the authors count them. A number reaches the paper's if
it is at least the paper's, or lower by at most the larger of the two standard deviations.

- ✓ accuracy and share reach the paper's; of a reference (Ref), the accuracy
- ≷ the accuracy does, the share does not
- ✗ the accuracy does not
- ◐ training was shortened
- ¹ one seed only

There are two columns of ours where the objective matters: *balanced*, in which every layer has the same weight, and
that of the *authors'* code, which also divides by the size of a convolution's kernel. *In parts*: trained by
decoupled greedy learning, as in the paper. *From given weights*: trained end to end elsewhere; only the heads of the
parts are trained here.
"""

ACCURACY: Mapping[str, tuple[str, ...]] = {
    "table-1": ("accuracy",),
    "table-1-appendix": ("accuracy",),
    "table-2": ("Ref", "Ours", "Ours + FT"),
    "table-2-deep": ("Ref", "Ours + FT"),
    "table-2-given": ("Ref", "Ours + FT"),
    "table-3": ("Ref", "masked"),
    "snip": ("accuracy",),
    "snip-transfer": ("Ref", "masked"),
    "rescale": ("Ref", "masked"),
}
"""The columns of the first table on the page, by file."""

NOT_RUN: Mapping[str, str] = {
    "table-2-deep": "VGG-16 trained in parts: the training takes about 100 minutes of one core with AVX512-BF16, "
    "then each number one epoch of fine-tuning, about 8 such minutes.",
    "table-2-given": "VGG-16 from given weights: each number takes one epoch of fine-tuning.",
    "table-3": "VGG-16, transferred: for every data set the unpruned and the pruned network are trained from their "
    "initial weights, 4 epochs take about 30 and 25 minutes of one core with AVX512-BF16. The scores on CIFAR-10 are "
    "stored in `results/scores`.",
}
"""What the missing rows would take, by file; written once for all of them. In Table 2, VGG-16 has rows only for
what was run."""

ABOVE, LESS, BELOW, SHORTENED, ONE = "✓", "≷", "✗", "◐", "¹"

NAMES: Mapping[str, str] = {
    "table-2-deep": "VGG-16 in parts, program {0}, rule {1}",
    "table-2-given": "VGG-16 from given weights, program {0}, rule {1}",
}
"""Titles of rows, by file; other rows are called by their labels."""


def sum_up(tables: Mapping[str, Table]) -> str:
    """Every row of the paper's tables, with the paper's numbers and ours. Equal references are listed once."""
    rows = []
    reasons, ties, lacking, references = [], [], [], set()
    for name, columns in ACCURACY.items():
        if name in tables and not tables[name].rows and name in NOT_RUN:
            lacking.append(name)
        theirs = {row.labels: row for row in tables[f"{name}-authors"].rows} if f"{name}-authors" in tables else {}
        chosen = {row.labels: row for row in tables["table-2-chosen"].rows} if name == "table-2" else {}
        for row, column in product(tables[name].rows if name in tables else (), columns):
            share = None if column == "Ref" else "prune"
            paper = _show_pair(row.paper, column, share)
            ours = mark(row, column, share, tables[name].seeds)
            others = theirs.get(row.labels) if share else None
            marked = [ours, "" if others is None else mark(others, column, share, tables[name].seeds)]
            if ours == MISSING and name in NOT_RUN:
                lacking.append(name)
            if not paper or (column == "Ref" and (name, paper, ours) in references):
                continue
            references.add((name, paper, ours))
            title = NAMES.get(name, ", ".join(label for label in row.labels if label)).format(*row.labels)
            rows.append([name, title if len(columns) == 1 else f"{title}: {column}", paper, *marked])
            called = f"{name}, {title}{'' if len(columns) == 1 else f', {column}'}"
            if not any(ABOVE in each for each in marked):
                also = {
                    "by the authors' objective": others,
                    "at thresholds chosen on validation images": chosen.get(row.labels[:2]) if share else None,
                }
                reasons.append(f"- {called}: {explain(row, column, share, also)}")
            elif share and (by_chance := _compare_with_chance(row, column)):
                ties.append(f"- {called}: {by_chance}.")
    said = [NOT_RUN[name] for name in dict.fromkeys(lacking)]
    explained = ["Rows without ✓, and why:\n", *reasons, ""] if reasons else []
    explained += ["Rows with ✓ that show no gain over random units:\n", *ties, ""] if ties else []
    lines = format_table(("table", "row", "paper", "ours, balanced", "ours, authors' objective"), rows)
    return "\n".join([*lines, "", LEGEND, *explained, *(f"{each}\n" for each in said)]) + "\n"


def explain(row: Row, accuracy: str, share: str | None, also: Mapping[str, Row | None] | None = None) -> str:
    """Why a row does not reach the paper, in numbers; `also`: the same row measured in other ways."""
    ours, paper = row.ours.get(accuracy), row.paper.get(accuracy)
    if ours is None or paper is None:
        return "not run."
    parts = []
    if row.schedule:
        parts.append(f"shortened to {row.schedule}")
    reference = row.ours.get("Ref") or row.ours.get("reference")
    gap = ours.mean - paper.mean
    if share is None:
        parts.append(f"accuracy after training {abs(gap):.1f} {'above' if gap >= 0 else 'below'} the paper's")
    else:
        removed, printed = row.ours.get(share), row.paper.get(share)
        if removed and printed:
            more = removed.mean - printed.mean
            amount = f"{abs(more):.1f} points {'more' if more >= 0 else 'fewer'} of the parameters removed"
            parts.append(f"{amount}, accuracy {gap:+.1f} compared with the paper")
        if reference and accuracy != "Ref":
            parts.append(f"{ours.mean - reference.mean:+.1f} compared with our own reference")
        if by_chance := _compare_with_chance(row, accuracy):
            parts.append(by_chance)
    own = _show_pair(row.ours, accuracy, share)
    for how, other in (also or {}).items():
        if other and (shown := _show_pair(other.ours, accuracy, share)) not in ("", own):
            parts.append(f"{shown} {how}")
    return "; ".join(parts) + "."


def _compare_with_chance(row: Row, accuracy: str) -> str | None:
    """That random units are no worse to remove, if so."""
    ours, by_chance = row.ours.get(accuracy), row.ours.get("RP")
    if ours is None or by_chance is None or by_chance.mean < ours.mean:
        return None
    return f"no better than removing random units, which leaves {by_chance.mean:.1f}"


def _show_pair(figures: Mapping[str, Figure | None], accuracy: str, share: str | None) -> str:
    found = [f"{figure.mean:.1f}" for name in (accuracy, share) if name and (figure := figures.get(name))]
    return " / ".join(found)


def mark(row: Row, accuracy: str, share: str | None, seeds: int = 1) -> str:
    """Our numbers, and whether they reach the paper's. `seeds`: how many there should be."""
    shown, figure = _show_pair(row.ours, accuracy, share), row.ours.get(accuracy)
    if not shown or figure is None:
        return MISSING
    if row.schedule:
        verdict = SHORTENED
    elif not _reaches(figure, row.paper.get(accuracy)):
        verdict = BELOW
    else:
        verdict = ABOVE if not share or _reaches(row.ours.get(share), row.paper.get(share)) else LESS
    return f"{shown} {verdict}{ONE if figure.seeds == 1 < seeds else ''}"


def _reaches(ours: Figure | None, paper: Figure | None) -> bool:
    if paper is None:
        return True
    slack = max(paper.deviation or 0.0, (ours and ours.deviation) or 0.0)
    return ours is not None and ours.mean >= paper.mean - slack
