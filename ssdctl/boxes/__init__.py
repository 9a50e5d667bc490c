"""Boxes as tensors: formats, default boxes, coding, matching; independent of devices."""
