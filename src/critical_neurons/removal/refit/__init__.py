"""Refit: adjust the layers behind removed units so that their outputs change least."""
