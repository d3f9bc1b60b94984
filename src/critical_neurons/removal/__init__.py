"""Removal: units removed or masked, the remaining layers refitted, the result measured."""
