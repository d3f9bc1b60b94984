"""Distillation page: stored cells of public pretrained networks, as one figure and one table."""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from textwrap import wrap
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from critical_neurons.core.markdown import format_table
from published import NOTE, list_beside
from published import Figure as Published

PAGE = Path(__file__).parent.parent / "docs" / "distillation.md"
PICTURE = PAGE.parent / "quality" / "public-weights.svg"
OURS = "search"
USUAL = 1000
"""Default number of calibration images."""

STEPS = {"batch_norm": "batch norms re-estimated", "least_squares": "refitted", "distil": "distilled"}
FITTED = ("least_squares", "distil")
BARS = {
    ("resnet20", 0.73): 0.5,
    ("resnet20", 0.5): 2.0,
    ("resnet20", 0.3): 6.0,
    ("resnet56", 0.5): 1.0,
    ("resnet56", 0.3): 3.5,
    ("vgg16", 0.5): 0.3,
    ("784-300-100-10", 0.2): 1.2,
}
"""Targets: points of test accuracy lost at most, after distillation."""

BY_UNITS = ("784-300-100-10",)
TITLES = {"resnet20": "ResNet-20", "resnet56": "ResNet-56", "vgg16": "VGG-16", "784-300-100-10": "784-300-100-10"}

ABOUT = """\
ResNets of a public repository (akamaster/pytorch_resnet_cifar10) and a VGG-16 of our own on CIFAR-10, a fully
connected network of our own (784-300-100-10) on Fashion-MNIST. Points of accuracy lost on 10 000 test images, mean
over draws of the calibration images; less is better. Every method gets the same calibration images, budget,
refitting and distillation, without labels. *target*: the largest loss aimed at after distillation; it is missed
where the figure to its left is larger.
"""
METHOD = """\
`python benchmarks/distillation.py run --part test` measures what is missing, and can be resumed. Seconds are
processor time. Settings of distillation were chosen on validation images, the last 5 000 of the training split,
on which the public ResNets were trained too. *search* is `cn.search`; *greedy elimination* works layer by layer,
with layer shares from one global ranking; the other methods are importances of Torch-Pruning and activations.
"""
TIMED = """\
By the clock, choosing, refitting and distilling took {minutes:.1f} minutes for {network} at {share} on {threads}
threads ({lost:.2f} points lost).
"""
PUBLISHED = """\
Accuracies on CIFAR-10 as other methods report them, beside ours. Their networks and weights are others, so that only
orders of magnitude can be compared. Ours have no labels; *distilled* is training on the calibration images alone.
"""
WIDTH = 118
OLDER = {4: "least squares on held-out inputs, too", 6: "fewer full batches, best check returned"}
"""What was different in lines of earlier versions of the harness."""

Lines = Sequence[Mapping[str, Any]]


def write_page(lines: Lines) -> None:
    PAGE.write_text("\n".join(["# Public pretrained networks", "", *describe(lines, "quality/")]) + "\n")
    PICTURE.write_bytes(draw(lines))


def describe(lines: Lines, folder: str) -> list[str]:
    """The figure, the table and how it was measured."""
    tested = [line for line in lines if line["part"] == "test"]
    if not tested:
        return ["Nothing has been measured on test images yet."]
    last = tested[-1]
    return [
        f"![Points of test accuracy lost, by method and share of the multiply-adds]({folder}{PICTURE.name})",
        "",
        *wrap(ABOUT, WIDTH),
        "",
        *tabulate(tested),
        "",
        *wrap(
            f"{METHOD} Last on {last['date']}, {last['machine']}, one thread, torch {last['versions']['torch']}.",
            WIDTH,
        ),
        *(
            line
            for timed in tested
            if timed.get("threads", 1) > 1
            for line in ("", *wrap(_describe_time(timed), WIDTH))
        ),
        "",
        "## Published figures",
        "",
        *wrap(PUBLISHED + NOTE, WIDTH),
        "",
        *list_beside(_list_ours(tested)),
    ]


def _describe_time(line: Mapping[str, Any]) -> str:
    elapsed, accuracy = line["clock_seconds"], line["accuracy"]
    return TIMED.format(
        minutes=(elapsed["choosing"] + elapsed["distil"]) / 60,
        network=TITLES[line["network"]],
        share=_name_share(line["network"], _share(line)),
        threads=line["threads"],
        lost=100 * (accuracy["before"] - accuracy["distil"]),
    )


def _list_ours(lines: Lines) -> list[Published]:
    """What is published for CIFAR-10, of our search and distillation."""
    figures = []
    for (network, share, _), found in _group_ours(lines).items():
        if network not in BY_UNITS:
            before, after = (100 * fmean(each[step] for each in found) for step in ("before", "distil"))
            kept = f"{100 * share:.0f} % of the multiply-adds"
            figures.append(Published("this library", TITLES[network], kept, "distilled", before, after))
    return figures


def summarise(lines: Lines) -> list[str]:
    """Points of test accuracy that our search loses, as a short table, and the best other method distilled alike."""
    rows = []
    for (network, share, _), found in _group_ours(lines).items():
        before = fmean(each["before"] for each in found)
        lost = [summarise_draws([100 * (each["before"] - each[step]) for each in found]) for step in FITTED]
        data = "Fashion-MNIST" if network in BY_UNITS else "CIFAR-10"
        kept = f"{100 * share:.0f} % of the {'units' if network in BY_UNITS else 'multiply-adds'}"
        other = _describe_best_other(lines, network, share)
        rows.append([f"{TITLES[network]}, {data}", f"{100 * before:.1f} %", kept, *lost, other])
    header = ["network", "accuracy", "kept", *(f"points lost, {STEPS[step]}" for step in FITTED)]
    header.append("best other, distilled alike")
    return format_table(header, rows, numbers=(1, 3, 4))


def _describe_best_other(lines: Lines, network: str, share: float) -> str:
    """Of the other methods measured, the one that loses least after the same distillation."""
    lost = defaultdict(list)
    for line in _list_usual(lines):
        if line["method"] != OURS and (line["network"], _share(line)) == (network, share):
            accuracy = line["accuracy"]
            lost[line["method"]].append(100 * (accuracy["before"] - accuracy["distil"]))
    if not lost:
        return ""
    best = min(lost, key=lambda method: fmean(lost[method]))
    return f"{summarise_draws(lost[best])} ({best})"


def _group_ours(lines: Lines) -> dict[tuple[str, float, str], list[Mapping[str, float]]]:
    """Accuracies with our search and the usual number of images, by network, share and settings."""
    cells = defaultdict(list)
    for line in _list_usual(lines):
        if line["method"] == OURS:
            cells[line["network"], _share(line), _name_setting(line)].append(line["accuracy"])
    return dict(sorted(cells.items(), key=lambda cell: (list(TITLES).index(cell[0][0]), -cell[0][1])))


def _list_usual(lines: Lines) -> list[Mapping[str, Any]]:
    """On test images, with the usual number of calibration images."""
    return [line for line in lines if line["part"] == "test" and line["images"] == USUAL]


def tabulate(tested: Lines) -> list[str]:
    cells = defaultdict(list)
    for line in tested:
        cells[line["network"], _share(line), line["method"], line["images"], _name_setting(line)].append(line)
    header = ["network", "kept", "method", "images", "draws", "before", *STEPS.values(), "target"]
    header += ["choosing s", "refitting s", "distilling s", "settings"]
    rows = []
    order = sorted(cells, key=lambda key: (list(TITLES).index(key[0]), -key[1], key[2] != OURS, key[2:]))
    for network, macs, method, images, settings in order:
        same = cells[network, macs, method, images, settings]
        lost = [summarise_draws([100 * (a["before"] - a[step]) for a in _accuracies(same)]) for step in STEPS]
        bar = BARS.get((network, macs)) if method == OURS else None
        seconds = {
            name: fmean(line["processor_seconds"][name] for line in same)
            for name in ("choosing", "least_squares", "distil")
        }
        seconds["distil"] -= seconds["least_squares"]
        figures = [
            f"{100 * fmean(a['before'] for a in _accuracies(same)):.2f}",
            *lost,
            "" if bar is None else f"{bar}",
        ]
        texts = [TITLES[network], _name_share(network, macs), method, str(images), str(len(same)), *figures]
        rows.append([*texts, *(f"{each:.0f}" for each in seconds.values()), settings])
    return format_table(header, rows, numbers=range(3, len(header) - 1))


def draw(lines: Lines) -> bytes:
    """Points lost after distillation and, paler, after refitting, for every method with the default settings."""
    tested = _list_usual(lines)
    cases = sorted({(line["network"], -_share(line)) for line in tested})
    with rc_context({"svg.hashsalt": "critical_neurons", "font.size": 9}):
        picture = Figure(figsize=(8, 0.6 + 0.9 * max(len(cases), 1)), layout="constrained")
        chart = picture.subplots()
        places, names = [], []
        for network, negative in cases:
            found = defaultdict(list)
            for line in tested:
                if (line["network"], -_share(line)) == (network, negative):
                    found[line["method"]].append(line)
            for method, same in sorted(found.items(), key=lambda item: (item[0] != OURS, item[0])):
                lost = {
                    step: fmean(100 * (a["before"] - a[step]) for a in _accuracies(same))
                    for step in ("least_squares", "distil")
                }
                colour = "black" if method == OURS else "C0"
                chart.barh(len(places), lost["least_squares"], color=colour, alpha=0.25)
                chart.barh(len(places), lost["distil"], color=colour)
                places.append(len(places))
                names.append(f"{TITLES[network]}, {_name_share(network, -negative)}, {method}")
        chart.set_yticks(places, names)
        chart.invert_yaxis()
        chart.set_xlabel("points of test accuracy lost: refitted (pale), distilled (full)")
        content = io.BytesIO()
        picture.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def _accuracies(lines: Lines) -> list[Mapping[str, float]]:
    return [line["accuracy"] for line in lines]


def summarise_draws(values: Sequence[float]) -> str:
    """The mean and, of several draws, the standard deviation."""
    return f"{fmean(values):.2f}" + (f" ± {stdev(values):.2f}" if len(values) > 1 else "")


def _share(line: Mapping[str, Any]) -> float:
    share: float = line.get("macs") or line["units"]
    return share


def _name_share(network: str, share: float) -> str:
    return f"{share:g} of the {'units' if network in BY_UNITS else 'MACs'}"


def _name_setting(line: Mapping[str, Any]) -> str:
    settings = line["settings"]
    mixed = "" if settings["augment"] == "auto" else f", {settings['augment']}"
    older = "".join(f", {note}" for harness, note in OLDER.items() if line["harness"] < harness)
    return f"{settings['steps'] or 'usual'} steps of {settings['batch_size']}{mixed}{older}"
