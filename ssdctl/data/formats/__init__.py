"""Readers and writers of annotation formats. Torch-free."""
