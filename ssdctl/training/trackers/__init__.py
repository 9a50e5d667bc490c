"""Experiment trackers: TensorBoard, Weights & Biases, MLflow, and those of other packages."""
