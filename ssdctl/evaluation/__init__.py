"""From a network and a split to detections, and from detections to COCO AP."""
