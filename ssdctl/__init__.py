"""ssdctl: train, evaluate and ship SSD300 detectors. Importing it never imports torch."""

__version__ = "0.1.0.dev0"
