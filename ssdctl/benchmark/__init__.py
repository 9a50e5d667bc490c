"""Measure this machine's throughput."""
