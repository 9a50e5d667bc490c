"""Fetch, verify and unpack datasets and weights."""
