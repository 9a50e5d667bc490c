"""Detect objects on images."""
