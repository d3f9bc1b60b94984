"""Front page: the picture of the README from the stored results of benchmarks/quality.py, its table from those of
benchmarks/distillation.py.

python benchmarks/front_page.py      docs/figures/front-light.svg, front-dark.svg and the table in README.md
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from matplotlib import rc_context
from matplotlib.figure import Figure

from critical_neurons.core.files import make_folder, write_atomically
from critical_neurons_reproduction.store import Store
from distillation import read_lines
from distillation_page import summarise
from quality_page import CALIBRATION, OURS, RANDOM, UNIFORM, Measured, collect

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parent.parent / "docs" / "figures"
CASES = (("fashion", "lenet5"), ("fashion", "784-300-100-10"))
"""Data and network of each chart."""

PAPER = "paper's program"
README = Path(__file__).parent.parent / "README.md"
TABLE = re.compile("(?<=<!-- table -->\n)(.*?)(?=<!-- end of the table -->)", re.DOTALL)
"""Where the table stands in the README."""

LABELS = {OURS: "this library", RANDOM: "random units", PAPER: "the paper's scores", "L2": "L2 norm"}
COMPENSATE = "least_squares"
"""All methods are refitted alike, as the library does unless told otherwise."""

THEMES = {
    "light": {"text": "#1f2328", "grid": "#d0d7de", OURS: "#0550ae", "best": "#cf222e"},
    "dark": {"text": "#e6edf3", "grid": "#3d444d", OURS: "#79c0ff", "best": "#ff7b72"},
}
OTHERS = {"light": ("#8250df", "#57606a", "#9a6700"), "dark": ("#d2a8ff", "#9198a1", "#e3b341")}


def main() -> None:
    measured = collect(Store(RESULTS).find_all("quality"))
    folder = make_folder(FOLDER)
    for theme in THEMES:
        write_atomically(folder / f"front-{theme}.svg", draw(measured, theme))
    table = "\n".join(summarise(read_lines())) + "\n"
    write_atomically(README, TABLE.sub(lambda _: table, README.read_text()).encode())


def choose(measured: Sequence[Measured], case: tuple[str, str]) -> list[Measured]:
    """The cells of a chart: as many units of every layer removed, so that all methods have the same multiply-adds."""
    mine = [each for each in measured if each.place.case == case and each.place.images == CALIBRATION]
    return [each for each in mine if each.place.measure == "removed" and each.part == "test"]


def find_best_other(cells: Sequence[Measured]) -> str:
    """The baseline with the least loss over all cells of the chart."""
    names = [name for name in cells[0].methods if name != OURS and not name.endswith(UNIFORM)]
    return min(names, key=lambda name: fmean(loss for each in cells for loss in each.lose(name, COMPENSATE)))


def list_points(cells: Sequence[Measured], method: str) -> list[tuple[float, float]]:
    """Multiply-adds and accuracy in percent, mean over the seeds, from the whole network down."""
    results = [list(each.results.values()) for each in cells]
    before = fmean(result["before"] for part in results for result in part)
    points = [(100.0, 100 * before)]
    for part in results:
        macs = fmean(result["macs"][method][COMPENSATE] for result in part)
        points.append((100 * macs, 100 * fmean(result["accuracy"][method][COMPENSATE] for result in part)))
    return sorted(points, reverse=True)


def draw(measured: Sequence[Measured], theme: str) -> bytes:
    colours = THEMES[theme]
    settings = {"svg.hashsalt": "critical_neurons", "font.size": 10, "text.color": colours["text"]}
    settings |= {f"{part}.color": colours["text"] for part in ("xtick", "ytick")}
    settings |= {"axes.labelcolor": colours["text"], "axes.edgecolor": colours["grid"]}
    with rc_context(settings):
        figure = Figure(figsize=(9, 3.6), layout="constrained", facecolor="none")
        for chart, case in zip(figure.subplots(1, len(CASES)), CASES, strict=True):
            cells = choose(measured, case)
            best = find_best_other(cells)
            styles = _style(theme, colours, best)
            for method, style in styles.items():
                across, up = zip(*list_points(cells, method), strict=True)
                chart.plot(across, up, marker="o", markersize=3, **style)
            seeds = len(cells[0].results)
            chart.set_title(f"{cells[0].place.case_title} ({seeds} seeds)", fontsize=10)
            chart.set_xlabel("multiply-adds kept, %")
            chart.set_facecolor("none")
            chart.invert_xaxis()
            chart.grid(color=colours["grid"], linewidth=0.6)
            chart.spines[["top", "right"]].set_visible(False)
            chart.legend(fontsize=8.5, frameon=False, loc="lower left")
        figure.axes[0].set_ylabel("test accuracy, %")
        content = io.BytesIO()
        figure.savefig(content, format="svg", transparent=True, metadata={"Date": None})
    return content.getvalue()


def _style(theme: str, colours: Mapping[str, str], best: str) -> dict[str, dict[str, object]]:
    """What is drawn, last on top."""
    others = [name for name in (PAPER, RANDOM, "L2") if name != best]
    drawn = {
        name: {"label": LABELS[name], "color": colour, "linewidth": 1.2, "linestyle": "--"}
        for name, colour in zip(others, OTHERS[theme], strict=False)
    }
    drawn[best] = {"label": f"best other: {LABELS.get(best, best)}", "color": colours["best"], "linewidth": 1.6}
    drawn[OURS] = {"label": LABELS[OURS], "color": colours[OURS], "linewidth": 2.4}
    return dict(reversed(drawn.items()))


if __name__ == "__main__":
    main()
