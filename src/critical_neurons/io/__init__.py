"""Input and output: models, data, checkpoints, exports, other tools."""
