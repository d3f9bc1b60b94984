"""What is read and written: models, data, checkpoints, exports, other tools."""
