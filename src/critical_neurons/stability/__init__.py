"""Stability: network and box to the units that are always off or always on, each with its proof."""
