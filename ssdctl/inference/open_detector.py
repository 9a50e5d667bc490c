"""Open the detector of a file: a checkpoint in PyTorch, an ONNX file in onnxruntime."""

from __future__ import annotations

from ssdctl.checkpoint.reader import Checkpoint, load_network
from ssdctl.device.base import Device
from ssdctl.inference.detector import DEFAULTS, Detector, DetectorBackend, DetectorConfig
from ssdctl.inference.onnx_detector import OnnxDetector


def open_detector(
    checkpoint: Checkpoint,
    device: Device,
    config: DetectorConfig = DEFAULTS,
) -> DetectorBackend:
    """Return the detector of a checkpoint or an ONNX file (`read_model`), ready to run.

    Raises:
        UsageError: The device, precision or a threshold does not suit the file.
        IntegrityError: The weights do not fit the network, or the graph is damaged.
    """
    if checkpoint.graph is not None:
        return OnnxDetector(checkpoint, device, config)
    return Detector(device.place(load_network(checkpoint)).eval(), device, config)
