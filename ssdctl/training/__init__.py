"""Training: loop, step, schedule, optimizer, EMA, non-finite guard, resume, trackers.

Importing the package itself does not import torch: signal handlers are installed before.
"""
