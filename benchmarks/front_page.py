"""Front page: the README's figure from the stored results of benchmarks/refitted.py, and its table from those of
benchmarks/distillation.py.

python benchmarks/front_page.py      docs/figures/front-*.svg, and the tables in README.md and docs/results.md
"""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from critical_neurons.core.files import make_folder, write_atomically
from critical_neurons.core.markdown import format_table
from distillation import OURS, read_lines
from distillation_page import summarise, summarise_draws
from refitted import OTHERS, RANDOM
from refitted import read_lines as read_refitted

Lines = Sequence[Mapping[str, Any]]

FOLDER = Path(__file__).parent.parent / "docs" / "figures"
README = Path(__file__).parent.parent / "README.md"
RESULTS_PAGE = FOLDER.parent / "results.md"


def find_place(name: str) -> re.Pattern[str]:
    """The place of a table in a page."""
    return re.compile(f"(?<=<!-- {name} -->\n)(.*?)(?=<!-- end of the {name} -->)", re.DOTALL)


TABLE, CHANNEL_TABLE = map(find_place, ("table", "table of channels"))

ORDER = (OURS, *OTHERS)
NAMES = {"macs": "of the multiply-adds", "units": "of the channels"}

TITLE = "ResNet-20, CIFAR-10, weights of a public repository"
LABELS = {RANDOM: "random units", "L2": "L2 norm"}
SHOWN = ("L2", RANDOM)
"""Methods drawn in addition to the best one."""

THEMES = {
    "light": {"text": "#1f2328", "grid": "#d0d7de", OURS: "#0550ae", "best": "#cf222e", "others": "#57606a"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", OURS: "#79c0ff", "best": "#ff7b72", "others": "#9198a1"},
}


def main() -> None:
    folder, lines = make_folder(FOLDER), read_refitted()
    for theme in THEMES:
        write_atomically(folder / f"front-{theme}.svg", draw(lines, theme))
    pages = {README: {TABLE: summarise(read_lines())}, RESULTS_PAGE: {TABLE: tabulate(lines, "macs")}}
    pages[RESULTS_PAGE][CHANNEL_TABLE] = tabulate(lines, "units")
    for page, tables in pages.items():
        content = page.read_text()
        for place, table in tables.items():
            text = "\n".join(table) + "\n"
            content = place.sub(lambda _, text=text: text, content)
        write_atomically(page, content.encode())


def tabulate(lines: Lines, budget: str) -> list[str]:
    """A row for every method and division of the budget among layers; mean accuracy over draws by share kept."""
    mine = [line for line in lines if budget in line]
    shares = sorted({line[budget] for line in mine}, reverse=True)
    drawn = defaultdict(list)
    for line in mine:
        drawn[line["method"], line["division"], line[budget]].append(100 * line["accuracy"])
    cells = {name: summarise_draws(values) for name, values in drawn.items()}
    ways = sorted({(line["method"], line["division"]) for line in mine}, key=lambda way: (ORDER.index(way[0]), way))
    divided = any(division for _, division in ways)
    names = [way if divided else way[:1] for way in ways]
    found = [[cells.get((*way, share), "") for share in shares] for way in ways]
    whole = ["unpruned", *[""] * divided, *[f"{100 * mine[0]['before']:.2f}"] * len(shares)]
    header = ["units by", *["among layers"] * divided, *(f"{share:.0%} {NAMES[budget]}" for share in shares)]
    rows = [whole, *([*name, *figures] for name, figures in zip(names, found, strict=True))]
    return format_table(header, rows, numbers=range(len(header) - len(shares), len(header)))


def choose_division(lines: Lines, method: str) -> list[Mapping[str, Any]]:
    """The lines of a method with its better division of the MACs among layers, by mean accuracy."""
    mine = [line for line in lines if line["method"] == method and "macs" in line]
    ways = ([line for line in mine if line["division"] == way] for way in dict.fromkeys(x["division"] for x in mine))
    return max(ways, key=lambda way: fmean(line["accuracy"] for line in way))


def find_best_other(lines: Lines) -> str:
    """The method with the highest mean accuracy over the shares."""
    return max(OTHERS, key=lambda name: fmean(line["accuracy"] for line in choose_division(lines, name)))


def list_points(lines: Lines, method: str) -> list[tuple[float, float]]:
    """MACs kept and accuracy, in percent, means over draws, starting with the unpruned network."""
    mine = choose_division(lines, method)
    shares = {line["macs"]: [each for each in mine if each["macs"] == line["macs"]] for line in mine}
    points = [
        tuple(fmean(each[name] for each in same) for name in ("macs_kept", "accuracy")) for same in shares.values()
    ]
    return [(100 * macs, 100 * accuracy) for macs, accuracy in sorted([(1.0, mine[0]["before"]), *points])[::-1]]


def draw(lines: Lines, theme: str) -> bytes:
    colours = THEMES[theme]
    settings = {"svg.hashsalt": "critical_neurons", "font.size": 10, "text.color": colours["text"]}
    settings |= {f"{part}.color": colours["text"] for part in ("xtick", "ytick")}
    settings |= {"axes.labelcolor": colours["text"], "axes.edgecolor": colours["grid"]}
    with rc_context(settings):
        figure = Figure(figsize=(7, 3.6), layout="constrained", facecolor="none")
        chart = figure.add_subplot(facecolor="none")
        for method, style in list_styles(colours, find_best_other(lines)).items():
            across, up = zip(*list_points(lines, method), strict=True)
            chart.plot(across, up, marker="o", markersize=4, **style)
        chart.set_title(TITLE, fontsize=10)
        chart.set_xlabel("multiply-adds kept, %")
        chart.set_ylabel("test accuracy, %")
        chart.invert_xaxis()
        chart.grid(color=colours["grid"], linewidth=0.6)
        chart.spines[["top", "right"]].set_visible(False)
        chart.legend(fontsize=9, frameon=False, loc="lower left")
        content = io.BytesIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return content.getvalue()


def list_styles(colours: Mapping[str, str], best: str) -> dict[str, dict[str, Any]]:
    """Line styles by method, in the order of the legend."""
    first = {
        OURS: {"label": "this library", "color": colours[OURS], "linewidth": 2.4, "zorder": 4},
        best: {"label": f"best other: {LABELS.get(best, best)}", "color": colours["best"], "linewidth": 1.6},
    }
    dashes = zip((name for name in SHOWN if name != best), ("--", ":"), strict=False)
    others = {
        name: {"label": LABELS[name], "color": colours["others"], "linewidth": 1.2, "linestyle": dash}
        for name, dash in dashes
    }
    return first | others


if __name__ == "__main__":
    main()
