"""Pages and pictures about runs: the report, evaluations, the preview. Torch-free in parts."""
