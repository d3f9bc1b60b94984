"""The public verbs, one file each; `critical_neurons/__init__.py` imports them on first use."""
