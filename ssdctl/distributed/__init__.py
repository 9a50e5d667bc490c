"""Ranks, process group and collectives."""
