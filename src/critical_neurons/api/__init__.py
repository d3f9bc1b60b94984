"""The public verbs, one file each. `critical_neurons/__init__.py` resolves them."""
