"""The network, its loss, and the conversion of its output into detections."""
