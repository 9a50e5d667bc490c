"""Detect objects on pictures."""
