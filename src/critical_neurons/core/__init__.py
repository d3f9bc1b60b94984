"""Frozen data that checks itself and nothing more. It knows no torch."""
