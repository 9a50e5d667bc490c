"""Measure prediction on images: its rate, and its peak memory on a large image and on a video.

    python benchmarks/predict.py [--backbone resnet34] [--images 64] [--rounds 3]
    python benchmarks/predict.py --only tiles
    python benchmarks/predict.py --only video [--frames 2000]
    python benchmarks/predict.py --only latency [--ultralytics-python VENV/bin/python]

Rate: JPEGs of 640 x 480 by a loop over `Predictor.predict`, and in batches with decoding ahead, in
turn; the best round of each. Memory: the peak resident set of `ssdctl predict` as a process, on a
small image, on 8,000 x 6,000 pixels with tiles, and on videos of two lengths. Latency: one image
by PyTorch, onnxruntime and OpenVINO, against torchvision's ssd300_vgg16 and, from another
environment, ultralytics' yolo11n, as processes in turn. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import ssdctl
from ssdctl.benchmark.evaluate import suppress_objects
from ssdctl.checkpoint import third_party
from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.exporting import graphs
from ssdctl.exporting.deployed import Deployment
from ssdctl.exporting.int8 import quantize
from ssdctl.model.ssd300 import SSD300
from ssdctl.runtime.system import usable_cores

LARGE = (8000, 6000)
TILE = 600
LATENCY_ROUNDS, LATENCY_CALLS = 6, 4
PEAK = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backbone", default="resnet34")
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--frames", type=int, default=2000)
    parser.add_argument("--only", choices=["rate", "tiles", "video", "latency"])
    parser.add_argument("--ultralytics-python", help="Python of an environment with ultralytics")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdctl-benchmark-") as name:
        folder = Path(name)
        checkpoint = save_checkpoint(folder, options.backbone)
        if options.only in (None, "rate"):
            measure_rate(checkpoint, folder, options)
        if options.only in (None, "tiles"):
            measure_tiles(checkpoint, folder)
        if options.only in (None, "video"):
            measure_video(checkpoint, folder, options.frames)

        if options.only in (None, "latency"):
            measure_latency(checkpoint, folder, options)


def save_checkpoint(folder: Path, backbone: str) -> Path:
    """Write random weights in a third-party layout, which needs no run."""
    torch.manual_seed(0)
    state = third_party.to_third_party(SSD300(backbone, 81, "none").state_dict(), "mlperf")
    torch.save({"model": state, "label_map": {}, "epoch": 1}, folder / "weights.pt")
    return folder / "weights.pt"


def write_image(path: Path, size: tuple[int, int], seed: int) -> Path:
    """Write smooth random colors, so that a JPEG has the size of a photo."""
    small = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), np.uint8)
    Image.fromarray(small).resize(size).save(path, quality=90)
    return path


def measure_rate(checkpoint: Path, folder: Path, options: argparse.Namespace) -> None:
    count = options.images
    paths = [write_image(folder / f"{n:04}.jpg", (640, 480), n) for n in range(count)]
    predictor = ssdctl.load(checkpoint, device="cpu")
    threads = usable_cores(1)

    def loop() -> None:
        for path in paths:
            predictor.predict(path)

    def batched() -> None:
        results = predictor.predict_iter(paths, batch_size=options.batch_size)
        assert sum(1 for _ in results) == count

    pixels = np.asarray(Image.open(paths[0]))
    places = count // options.batch_size * options.batch_size

    def network(batch_size: int) -> None:
        images = torch.zeros(batch_size, 3, 300, 300).contiguous(memory_format=torch.channels_last)
        with torch.no_grad():
            for _ in range(0, places, batch_size):
                predictor.model(images)

    with torch.no_grad():
        suppress_objects(predictor.model, predictor.model(torch.randn(1, 3, 300, 300))[1])
    predictor.predict(paths[: options.batch_size])
    work: dict[str, Callable[[], object]] = {
        "loop": loop,
        "batched": batched,
        "network, batch": lambda: network(options.batch_size),
        "in memory": lambda: [predictor(pixels) for _ in range(places)],
        "network, one": lambda: network(1),
    }
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(options.rounds):
        for name, run in work.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    least = {name: min(times) for name, times in seconds.items()}
    rates = {name: count / least[name] for name in ("loop", "batched")}
    print(f"{options.backbone}, {count} JPEGs of 640 x 480, {torch.get_num_threads()} threads")
    print(f"a loop over single images: {rates['loop']:.1f} img/s")
    print(
        f"batches of {options.batch_size}, decoded ahead by {threads} threads: "
        f"{rates['batched']:.1f} img/s, {rates['batched'] / rates['loop']:.2f} times"
    )
    alone = places / least["network, batch"]
    print(
        f"the network alone, the same batches: {alone:.1f} img/s, of which the batches from files "
        f"reach {rates['batched'] / alone:.0%}"
    )
    beyond = 1000 * (least["in memory"] - least["network, one"]) / places
    print(f"an image in memory: {beyond:.1f} ms beyond the network at batch 1")


def measure_tiles(checkpoint: Path, folder: Path) -> None:
    small = write_image(folder / "small.jpg", (640, 480), 0)
    large = write_image(folder / "large.jpg", LARGE, 1)
    print_peak("a image of 640 x 480", checkpoint, small)
    label = f"a image of {LARGE[0]} x {LARGE[1]} with --tile {TILE}"
    print_peak(label, checkpoint, large, "--tile", str(TILE))


def measure_video(checkpoint: Path, folder: Path, frames: int) -> None:
    for count in (frames // 20, frames):
        path = folder / f"{count}.mp4"
        write_video(path, count)
        label = f"a video of 640 x 480, {count} frames, annotated"
        print_peak(label, checkpoint, path, "--out", str(folder / f"out-{count}"))


def measure_latency(checkpoint: Path, folder: Path, options: argparse.Namespace) -> None:
    write_image(folder / "photo.jpg", (640, 480), 0)
    export_graphs(checkpoint, folder)
    kinds = ["fp32", "bf16", "onnx", "int8", "openvino-f32", "openvino-bf16", "ssd300_vgg16"]
    pythons = dict.fromkeys(kinds, sys.executable)
    if options.ultralytics_python:
        pythons["yolo11n"] = options.ultralytics_python
    environment = {**os.environ, "YOLO_OFFLINE": "true", "YOLO_CONFIG_DIR": str(folder)}
    script = str(Path(__file__).with_name("latency_worker.py"))
    workers = {}
    for kind, python in pythons.items():
        command = [python, script, kind, str(folder)]
        workers[kind] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
    for worker in workers.values():
        answer_of(worker)  # it is ready
    seconds: dict[str, list[float]] = {kind: [] for kind in workers}
    for _ in range(LATENCY_ROUNDS):
        for kind, worker in workers.items():
            assert worker.stdin is not None
            print(LATENCY_CALLS, file=worker.stdin, flush=True)
            seconds[kind] += answer_of(worker)
    for worker in workers.values():
        worker.communicate()
    load = os.getloadavg()[0]
    print(f"{options.backbone}, 640 x 480, {usable_cores(1)} cores, load {load:.1f}")
    print("                 fastest  median")
    for kind, times in seconds.items():
        print(f"{kind:<15}  {1000 * min(times):4.0f} ms  {1000 * statistics.median(times):4.0f} ms")


def answer_of(worker: subprocess.Popen[str]) -> list[float]:
    assert worker.stdout is not None
    while not (line := worker.stdout.readline()).startswith("["):  # ultralytics prints more
        assert line, "the worker ended"
    seconds: list[float] = json.loads(line)
    return seconds


def export_graphs(checkpoint: Path, folder: Path) -> None:
    """Write the network with NMS as ONNX, as int8 ONNX, and as OpenVINO's IR."""
    import openvino

    deployment = Deployment(load_checkpoint(checkpoint))
    graph = graphs.network_graph(deployment)
    for name, network in (
        ("ssd", graph),
        ("int8", quantize(graph, random_images(8), None, keep_heads=False)),
    ):
        content = graphs.with_metadata(graphs.with_nms(network, deployment), deployment)
        (folder / f"{name}.onnx").write_bytes(content)
    model = openvino.convert_model(folder / "ssd.onnx")
    openvino.save_model(model, folder / "ssd.xml", compress_to_fp16=False)


def random_images(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 300, 300, 3), np.uint8)


def print_peak(label: str, checkpoint: Path, source: Path, *options: str) -> None:
    """Run `ssdctl predict` as a process, and print its peak resident set and its duration."""
    command = [sys.executable, "-m", "ssdctl", "predict", str(checkpoint), str(source), *options]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *command, "--device", "cpu", "--quiet"],
        check=True,
        capture_output=True,
        text=True,
    )
    code, peak = map(int, done.stdout.split())
    assert code == 0, done.stderr
    print(f"{label}: peak {peak / 1024:.0f} MiB, {time.perf_counter() - start:.0f} s")


def write_video(path: Path, frames: int) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=25)
        stream.width, stream.height, stream.pix_fmt = 640, 480, "yuv420p"
        base = np.random.default_rng(0).integers(0, 256, (60, 80, 3), np.uint8)
        image = np.asarray(Image.fromarray(base).resize((640, 480)))
        for n in range(frames):
            pixels = np.ascontiguousarray(np.roll(image, 4 * n, axis=1))
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode(None))


if __name__ == "__main__":
    main()
