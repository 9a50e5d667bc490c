"""The network, its loss and what turns its output into detections."""
