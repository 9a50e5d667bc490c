"""Run an exported file by its own runtime: python run_exported.py FILE PICTURES.npy OUTPUTS.npz

This script must work where ssdctl is not installed.
"""

import sys
from pathlib import Path

import numpy as np

sys.modules["ssdctl"] = None


def run_onnx(path, images):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, {"images": images}), strict=True))


def run_openvino(path, images):
    import openvino

    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return {output.any_name: array for output, array in compiled(images).items()}


def run_pt2(path, images):
    import torch

    outputs = torch.export.load(path).module()(torch.from_numpy(images))
    return {f"output{i}": tensor.numpy() for i, tensor in enumerate(outputs)}


path, images, target = sys.argv[1:]
run = {".onnx": run_onnx, ".xml": run_openvino, ".pt2": run_pt2}[Path(path).suffix]
np.savez(target, **run(path, np.load(images)))
