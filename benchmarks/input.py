"""Measure the input of ssdctl, of DALI and of a PIL pipeline like MLPerf's on the CPU.

    python benchmarks/input.py [--seconds 4] [--rounds 5] [--threads 2] [--images 256]

Images are generated: 640 x 480, natural spectrum, JPEG quality 75 (about 120 KB), 1 to 14 boxes.
Each pipeline runs in a separate process, a few seconds per round and in turn, so that a slow period
of the machine affects all of them; metrics are medians over the rounds, ratios are medians of the
rounds' ratios. Those of ssdctl ("ours") keep freed memory, as `ssdctl train` does; DALI is slower
with it. "host" is reading, cropping, decoding, resizing and boxes; "full" adds color,
normalization and targets, as in eager and in compiled steps. "third-party" is a re-implementation
of MLPerf's PIL pipeline in worker processes. DALI requires the extra. If other processes use the
machine, the processor time per image is more reliable than the rate.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import random
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageEnhance

from ssdctl.benchmark.data import full_chain
from ssdctl.boxes import (
    IMAGE_SIZE,
    Matcher,
    box_cxcywh_to_ltrb,
    box_ltrb_to_cxcywh,
    default_boxes_cxcywh,
    encode,
    pairwise_iou,
)
from ssdctl.config import PrepareConfig
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.prepare import prepare
from ssdctl.data.store import Split
from ssdctl.device import open_device
from ssdctl.input.batch import LoaderConfig
from ssdctl.input.loader import TrainLoader, crop_edges, decode_sample
from ssdctl.input.open import open_input
from ssdctl.model.backbones import RESNET
from ssdctl.runtime.system import tune_process

BATCH, WIDTH, HEIGHT = 32, 640, 480
MIN_IOUS = (None, 0.1, 0.3, 0.5, 0.7, 0.9, 0.0)
Count = Iterator[int]  # images of each batch that came out


def stage_times(split: Split, loader_config: LoaderConfig, num_images: int) -> dict[str, float]:
    """Return the median milliseconds per image of each stage of the loader, in one thread.

    `draw` is the image's share of drawing a batch's samples, crops and colors. The loader decodes
    what it reads and resizes what it decodes, so two stages are differences of its own calls.
    """
    loader = TrainLoader(split, loader_config)
    out = np.empty((IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    spent: dict[str, list[float]] = {"draw": [], "read": [], "decode": [], "crop_resize": []}
    for start in range(0, num_images, loader_config.batch_size):
        begin = time.perf_counter()
        samples = loader.draw(start)
        spent["draw"].append((time.perf_counter() - begin) / loader_config.batch_size)
        for slot, row in enumerate(samples.rows.tolist()):
            _, rows = crop_edges(split, samples, slot)
            spent["read"].append(_seconds(split.images.read, row))
            read_again = _seconds(split.images.read, row)  # from memory, as in the next two
            decode = _seconds(split.decode, row, rows)
            whole = _seconds(decode_sample, split, samples, slot, out)
            spent["decode"].append(max(decode - read_again, 0.0))
            spent["crop_resize"].append(max(whole - decode, 0.0))
    return {name: 1000 * statistics.median(values) for name, values in spent.items()}


def _seconds(work: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def make_dataset(root: Path, num_images: int) -> None:
    """COCO's layout with generated images, the same ones each time."""
    rng = np.random.default_rng(0)
    (root / "annotations").mkdir(parents=True)
    (root / "train2017").mkdir()
    images, annotations, sizes = [], [], []
    for number in range(num_images):
        name = f"{number:06d}.jpg"
        buffer = io.BytesIO()
        Image.fromarray(natural_image(rng)).save(buffer, "JPEG", quality=75)
        (root / "train2017" / name).write_bytes(buffer.getvalue())
        sizes.append(buffer.tell())
        images.append({"id": number, "file_name": name, "width": WIDTH, "height": HEIGHT})
        for _ in range(rng.integers(1, 15)):
            w, h = rng.uniform(20, 300), rng.uniform(20, 300)
            x, y = rng.uniform(0, WIDTH - w), rng.uniform(0, HEIGHT - h)
            box = {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0}
            number_ = len(annotations)
            category = int(rng.integers(1, 81))
            annotations.append({"id": number_, "image_id": number, "category_id": category, **box})
    categories = [{"id": i, "name": f"class {i}"} for i in range(1, 81)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (root / "annotations/instances_train2017.json").write_text(json.dumps(content))
    print(f"{num_images} images of {np.mean(sizes) / 1e3:.0f} KB, {len(annotations)} boxes")


def natural_image(rng: np.random.Generator) -> np.ndarray:
    """Noise whose amplitude falls as 1 / frequency, with correlated colors."""
    rows, columns = np.fft.fftfreq(HEIGHT)[:, None], np.fft.rfftfreq(WIDTH)[None]
    frequency = np.maximum(np.hypot(rows, columns), 1 / WIDTH)

    def field() -> np.ndarray:
        noise = rng.standard_normal((2, *frequency.shape))
        values = np.fft.irfft2((noise[0] + 1j * noise[1]) / frequency, (HEIGHT, WIDTH))
        return values / values.std()

    gray = field()
    rgb = np.stack([gray + 0.4 * field() for _ in range(3)], axis=-1)
    return np.clip(118 + 50 * rgb, 0, 255).astype(np.uint8)


class MlperfDataset(torch.utils.data.Dataset):
    """MLPerf's way: PIL, one image at a time, in Python."""

    def __init__(self, root: Path, is_full: bool) -> None:
        content = json.loads((root / "annotations/instances_train2017.json").read_text())
        self.folder, self.is_full = root / "train2017", is_full
        self.names = [image["file_name"] for image in content["images"]]
        self.boxes: list[list[list[float]]] = [[] for _ in self.names]
        for entry in content["annotations"]:
            x, y, w, h = entry["bbox"]
            ltrb = [x / WIDTH, y / HEIGHT, (x + w) / WIDTH, (y + h) / HEIGHT]
            self.boxes[entry["image_id"]].append(ltrb)
        self.defaults = default_boxes_cxcywh()
        self.defaults_ltrb = box_cxcywh_to_ltrb(self.defaults)

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        index = random.randrange(len(self.names))
        image = Image.open(self.folder / self.names[index]).convert("RGB")
        image, boxes = mlperf_crop(image, torch.tensor(self.boxes[index]))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            boxes = torch.stack([1 - boxes[:, 2], boxes[:, 1], 1 - boxes[:, 0], boxes[:, 3]], 1)
        image = image.resize((300, 300), Image.Resampling.BILINEAR)
        if not self.is_full:
            padded = torch.zeros(14, 4)
            padded[: len(boxes)] = boxes
            return torch.from_numpy(np.array(image)), padded
        pixels = torch.from_numpy(np.array(mlperf_color(image))).permute(2, 0, 1).float() / 255
        pixels = (pixels - torch.tensor(RESNET.mean)[:, None, None]) / torch.tensor(RESNET.std)[
            :, None, None
        ]
        owner, labels = Matcher()(boxes[None], torch.ones(1, len(boxes)).long(), self.defaults_ltrb)
        targets = encode(box_ltrb_to_cxcywh(boxes[owner[0]]), self.defaults)
        return pixels, targets, labels[0]


def mlperf_crop(image: Image.Image, boxes: torch.Tensor) -> tuple[Image.Image, torch.Tensor]:
    """One attempt a mode, then another mode."""
    while True:
        mode = random.choice(MIN_IOUS)
        if mode is None:
            return image, boxes
        w, h = random.uniform(0.3, 1), random.uniform(0.3, 1)
        if not 0.5 <= w / h <= 2:
            continue
        left, top = random.uniform(0, 1 - w), random.uniform(0, 1 - h)
        rect = torch.tensor([[left, top, left + w, top + h]])
        if not bool((pairwise_iou(boxes, rect) > mode).all()):
            continue
        center = (boxes[:, :2] + boxes[:, 2:]) / 2
        inside = ((center > rect[:, :2]) & (center < rect[:, 2:])).all(1)
        if not bool(inside.any()):
            continue
        kept = (boxes[inside] - rect[:, [0, 1, 0, 1]]) / torch.tensor([w, h, w, h])
        edges = (rect[0] * torch.tensor([WIDTH, HEIGHT] * 2)).int().tolist()
        return image.crop(tuple(edges)), kept.clamp(0, 1)


def mlperf_color(image: Image.Image) -> Image.Image:
    """Brightness, contrast, saturation and hue, one after the other."""
    for enhance, spread in (
        (ImageEnhance.Brightness, 0.125),
        (ImageEnhance.Contrast, 0.5),
        (ImageEnhance.Color, 0.5),
    ):
        image = enhance(image).enhance(random.uniform(1 - spread, 1 + spread))
    hue, saturation, value = image.convert("HSV").split()
    turn = int(random.uniform(-0.05, 0.05) * 255) % 256
    shifted = Image.fromarray((np.array(hue) + np.uint8(turn)).astype(np.uint8))
    return Image.merge("HSV", (shifted, saturation, value)).convert("RGB")


def third_party(root: Path, threads: int, is_full: bool) -> Count:
    loader = torch.utils.data.DataLoader(MlperfDataset(root, is_full), BATCH, num_workers=threads)
    return (len(batch[0]) for batch in loader)


def dali(root: Path, threads: int, is_full: bool) -> Count:
    """Return the pipeline of DALI's own SSD example, with one attempt per mode."""
    from nvidia.dali import fn, pipeline_def, types

    anchors = box_cxcywh_to_ltrb(default_boxes_cxcywh()).flatten().tolist()

    @pipeline_def(batch_size=BATCH, num_threads=threads, device_id=None, seed=1)
    def build() -> tuple[object, ...]:
        encoded, boxes, labels = fn.readers.coco(
            file_root=str(root / "train2017"),
            annotations_file=str(root / "annotations/instances_train2017.json"),
            ratio=True,
            ltrb=True,
            random_shuffle=True,
            skip_empty=True,
        )
        anchor, shape, boxes, labels = fn.random_bbox_crop(
            boxes,
            labels,
            aspect_ratio=[0.5, 2.0],
            thresholds=[0.0, 0.1, 0.3, 0.5, 0.7, 0.9],
            scaling=[0.3, 1.0],
            bbox_layout="xyXY",
            allow_no_crop=True,
            num_attempts=1,
        )
        images = fn.decoders.image_slice(encoded, anchor, shape, output_type=types.RGB)
        images = fn.resize(images, resize_x=300, resize_y=300, antialias=True)
        flip = fn.random.coin_flip(probability=0.5)
        boxes = fn.bb_flip(boxes, ltrb=True, horizontal=flip)
        if not is_full:
            return fn.flip(images, horizontal=flip), boxes, labels
        images = fn.color_twist(
            images,
            brightness=fn.random.uniform(range=[0.875, 1.125]),
            contrast=fn.random.uniform(range=[0.5, 1.5]),
            saturation=fn.random.uniform(range=[0.5, 1.5]),
            hue=fn.random.uniform(range=[-18.0, 18.0]),
        )
        images = fn.crop_mirror_normalize(
            images,
            mirror=flip,
            mean=[255 * m for m in RESNET.mean],
            std=[255 * s for s in RESNET.std],
            dtype=types.FLOAT,
            output_layout="CHW",
        )
        boxes, labels = fn.box_encoder(
            boxes, labels, anchors=anchors, offset=True, scale=300.0, criteria=0.5,
            stds=[0.1, 0.1, 0.2, 0.2],
        )  # fmt: skip
        return images, boxes, labels

    pipeline = build()
    pipeline.build()
    while True:
        yield len(pipeline.run()[0])


def loader_config(split: Split, threads: int) -> LoaderConfig:
    """Return the config of an augmented input for a single rank."""
    return LoaderConfig(seed=0, batch_size=BATCH, threads=threads, max_boxes=split.most_boxes)


def ssdctl_batches(
    root: Path,
    threads: int,
    store: Path,
    is_full: bool,
    pipeline: str = "native",
    execution: str = "eager",
) -> Count:
    if pipeline == "native":
        tune_process()
    split = open_dataset(root, store)["train"]
    batches = open_input(pipeline, split, loader_config(split, threads)).batches(0, 1 << 40)
    if is_full:
        return full_chain(batches, threads, open_device("cpu", execution=execution))
    return (len(batch.rows) for batch in batches)


def rate(count: Count, seconds: float) -> tuple[float, float]:
    """Return images per second, and processor milliseconds per image of only this process.

    Batches that were prepared while another pipeline was measured do not count.
    """
    for _ in range(4):
        next(count)
    images, start, busy = 0, time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - start) < seconds:
        images += next(count)
    return images / spent, 1000 * (time.process_time() - busy) / images


class Measured:
    """A pipeline in a child process, which runs on request."""

    def __init__(self, make: Callable[[], Count]) -> None:
        context = multiprocessing.get_context("spawn")
        self._to_child, inner = context.Pipe()
        # Not a daemon: the third-party pipeline starts worker processes.
        self._process = context.Process(target=_serve, args=(make, inner))
        self._process.start()
        inner.close()

    def rate(self, seconds: float) -> tuple[float, float] | str:
        """Return images per second and processor milliseconds per image, or what is missing."""
        self._to_child.send(seconds)
        answer: tuple[float, float] | str = self._to_child.recv()
        return answer

    def close(self) -> None:
        self._to_child.close()
        self._process.join()


def _serve(make: Callable[[], Count], questions: Connection) -> None:
    warnings.simplefilter("ignore")  # DALI's and PIL's notices
    torch.set_num_threads(1)  # the pipelines have threads of their own
    count = None
    with contextlib.suppress(EOFError):
        while seconds := questions.recv():
            try:
                count = count or make()
                questions.send(rate(count, seconds))
            except ImportError as error:
                questions.send(str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--only", default="", help="parts of names, separated by ;")
    parser.add_argument("--verbose", action="store_true", help="every round's metrics")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssdctl-input-") as folder:
        root = Path(folder) / "data"
        make_dataset(root, options.images)
        stores = {name: Path(folder) / name for name in ("files", "packed", "shrunk", "raw")}
        prepare(root, stores["files"], PrepareConfig(pack=False))
        prepare(root, stores["packed"])
        prepare(root, stores["shrunk"], PrepareConfig(shrink=300))
        prepare(root, stores["raw"], PrepareConfig(shrink=300, encoding="raw"))
        threads = options.threads
        ssdctl = partial(partial, ssdctl_batches, root, threads)
        makers = {
            "ours, host, files": ssdctl(stores["files"], False),
            "ours, host, packed": ssdctl(stores["packed"], False),
            "ours, host, shrunk to 300": ssdctl(stores["shrunk"], False),
            "ours, host, raw, shrunk to 300": ssdctl(stores["raw"], False),
            "ours, full, packed": ssdctl(stores["packed"], True),
            "ours, full, compiled": ssdctl(stores["packed"], True, execution="compile"),
            "ours by --pipeline dali": ssdctl(stores["files"], False, "dali"),
            "DALI, host": partial(dali, root, threads, False),
            "DALI, full": partial(dali, root, threads, True),
            "third-party, host": partial(third_party, root, threads, False),
            "third-party, full": partial(third_party, root, threads, True),
        }
        selected = [part for part in options.only.split(";") if part]
        pipelines = {
            name: Measured(make)
            for name, make in makers.items()
            if not selected or any(part in name for part in selected)
        }
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in pipelines}
        for _ in range(options.rounds):
            for name in list(rates):
                result = pipelines[name].rate(options.seconds)
                if isinstance(result, str):
                    print(f"{name}: {result}; pip install nvidia-dali-cuda130")
                    del rates[name]
                else:
                    rates[name].append(result)
        for pipeline in pipelines.values():
            pipeline.close()
        if options.verbose:
            print(rates)
        for name, values in rates.items():
            wall, busy = (statistics.median(column) for column in zip(*values, strict=True))
            line = f"{name:<32}{wall:8.0f} img/s"
            if "third-party" not in name:  # whose time is spent in worker processes
                line += f"{busy:8.2f} ms of a core per image"
            other = "DALI, full" if "full" in name else "DALI, host"
            if other in rates and name != other:
                pairs = list(zip(values, rates[other], strict=True))
                line += f"{statistics.median(a[0] / b[0] for a, b in pairs):8.2f} x {other}"
                if "third-party" not in name:
                    line += (
                        f" ({statistics.median(b[1] / a[1] for a, b in pairs):.2f} by core time)"
                    )
            print(line)
        torch.set_num_threads(1)
        tune_process()
        for name in ("files", "raw"):
            split = open_dataset(root, stores[name])["train"]
            times = stage_times(split, loader_config(split, 1), num_images=320)
            listed = ", ".join(f"{k} {v:.3f}" for k, v in times.items())
            print(f"{name}, one thread, ms per image: {listed}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # DALI's and PIL's notices
    main()
