"""The run folder: file names, metrics, config snapshot, environment."""
