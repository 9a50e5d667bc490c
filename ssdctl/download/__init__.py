"""Fetch, verify and unpack datasets and weights. Torch-free."""
