"""Boxes as tensors: formats, default boxes, coding, matching. No device words, no autocast."""
