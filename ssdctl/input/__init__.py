"""Batches: which samples, which crops, which pixels. A batch is a function of (seed, step)."""
