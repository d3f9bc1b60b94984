"""Reproducing: every cell of the tables and figures, run, stored and rendered."""
