"""One training run: the loop, the step, the schedule, checkpoints, ranks and signals.

Importing this package never imports torch: signals.py must be in place before.
"""
