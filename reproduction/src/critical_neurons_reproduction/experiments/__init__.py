"""Experiments: every cell of the paper's tables and figures, run, stored and rendered."""

from critical_neurons_reproduction.experiments.cells import QUICK, TABLES, WHOLE, Schedule, list_cells, select_cells
from critical_neurons_reproduction.experiments.page import write_page
from critical_neurons_reproduction.experiments.runner import find_work, run_cells
from critical_neurons_reproduction.experiments.table_layouts import build_tables, write_tables
from critical_neurons_reproduction.experiments.workspace import Runs

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
