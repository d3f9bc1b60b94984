"""Reproducing: every cell of the paper's tables and figures, run, stored and rendered."""

from critical_neurons.experiments.reproducing.cells import QUICK, TABLES, WHOLE, Schedule, list_cells, select_cells
from critical_neurons.experiments.reproducing.page import write_page
from critical_neurons.experiments.reproducing.rendering import build_tables, write_tables
from critical_neurons.experiments.reproducing.running import find_work, run_cells
from critical_neurons.experiments.reproducing.runs import Runs

__all__ = [
    "QUICK",
    "TABLES",
    "WHOLE",
    "Runs",
    "Schedule",
    "build_tables",
    "find_work",
    "list_cells",
    "run_cells",
    "select_cells",
    "write_page",
    "write_tables",
]
