"""`ssdctl benchmark`."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ssdctl.cli.command import Call, command, command_group
from ssdctl.runtime.system import tune_process

if TYPE_CHECKING:
    from ssdctl.benchmark.data import Figures
    from ssdctl.data.store import Split

group = command_group(
    "benchmark", "This machine", "Benchmark data loading, training, and evaluation."
)

TRAIN_IMAGES, VAL_IMAGES = 256, 64  # generated if there is no --data
Seconds = Annotated[
    float, Option("--seconds", help="Seconds per measurement", metavar="S", min=0.1)
]


@command(
    "data",
    group,
    settings="data.* train.workers train.augment train.seed train.pipeline train.execution",
    examples=[
        "ssdctl benchmark data",
        "ssdctl benchmark data --data /data/coco --workers 8",
        "ssdctl benchmark data --data /data/coco --gpu-rate 3000 --gpus 8   # how many cores",
        "ssdctl benchmark data --execution compile   # the full pipeline, compiled as in training",
    ],
)
def data(
    call: Call,
    seconds: Seconds = 5.0,
    gpu_rate: Annotated[
        float | None,
        Option(
            help="Training speed of one GPU (img/s), to compute the cores it needs",
            metavar="R",
            min=0.1,
            max=1e9,
        ),
    ] = None,
    gpus: Annotated[int, Option(help="Number of GPUs, for --gpu-rate", metavar="N", min=1)] = 1,
) -> None:
    """Benchmark data loading on the CPU.

    The host stage reads, crops, decodes and resizes images: all that the CPU does in training. The
    full pipeline adds colors, normalization and targets. The time of each step for one image in
    one thread is also printed.
    """
    if call.config.train.pipeline != "dali":  # as in training
        tune_process()
    from ssdctl.benchmark.data import benchmark_data, required_cores

    with _splits(call) as splits:
        figures = benchmark_data(splits["train"], call.config, seconds)
    call.console.info(
        f"{figures['workers']} threads load {figures['images_per_second']:,} img/s: enough if the "
        "GPUs of this machine train at most that many in total"
    )
    if gpu_rate is not None:
        figures |= required_cores(figures, gpu_rate, gpus)
        remedy = "; or a smaller or decoded store: ssdctl prepare --shrink 512 --encoding raw"
        call.console.info(
            f"{gpus} x {gpu_rate:,} img/s need {figures['required_cores']} such cores"
            f"{'' if figures['is_sufficient'] else remedy}"
        )
    _print_figures(call, figures)


@command(
    "train",
    group,
    settings=(
        "data.* model.* train.preset train.batch_size train.precision train.device "
        "train.execution train.tf32 train.workers train.pipeline"
    ),
    examples=[
        "ssdctl benchmark train --bs 8 --fp32",
        "ssdctl benchmark train --backbone resnet50 --bs auto --fake-data",
        "ssdctl launch --gpus 8 -- benchmark train --bs 128   # with the scaling efficiency",
    ],
)
def train(
    call: Call,
    seconds: Seconds = 20.0,
    fake_data: Annotated[
        bool, Option("--fake-data", help="Measure only the device, without images")
    ] = False,
) -> None:
    """Benchmark training: speed, memory, and hours of a run.

    The speed on real images is compared with that on random ones.
    """
    if call.config.train.pipeline != "dali":  # as in training
        tune_process()
    from ssdctl.benchmark.train import benchmark_train

    with contextlib.nullcontext() if fake_data else _splits(call) as splits:
        split = splits["train"] if splits else None
        figures = benchmark_train(split, call.resolved, seconds)
    if figures is not None:
        _print_figures(call, figures)


@command(
    "evaluate",
    group,
    settings=(
        "data.* model.backbone evaluate.split evaluate.batch_size evaluate.precision "
        "evaluate.device evaluate.workers evaluate.score_threshold evaluate.nms_iou"
    ),
    examples=["ssdctl benchmark evaluate", "ssdctl benchmark evaluate --data /data/coco"],
)
def evaluate(call: Call, seconds: Seconds = 5.0) -> None:
    """Benchmark evaluation: network, detection, latency, and COCO scoring."""
    tune_process()
    from ssdctl.benchmark.evaluate import benchmark_evaluate
    from ssdctl.data.dataset import require_split
    from ssdctl.data.store_folder import dataset_folders

    with _splits(call) as splits:
        root, _ = dataset_folders(call.config.data)
        split = require_split(splits, call.config.evaluate.split, root)
        _print_figures(call, benchmark_evaluate(split, call.config, seconds))


@contextlib.contextmanager
def _splits(call: Call) -> Iterator[dict[str, Split]]:
    """Yield the splits of the config's dataset, else of a generated one."""
    from ssdctl.config import PrepareConfig
    from ssdctl.data import shapes
    from ssdctl.data.open_dataset import open_dataset
    from ssdctl.data.prepare import prepare
    from ssdctl.data.store_folder import dataset_folders

    if call.config.data.root is not None:
        root, folder = dataset_folders(call.config.data)
        yield open_dataset(root, folder, progress=call.console.progress)
        return
    with tempfile.TemporaryDirectory(prefix="ssdctl-benchmark-") as temporary:
        call.console.info("no --data: measuring on generated shapes")
        root = Path(temporary)
        shapes.generate(root, num_train=TRAIN_IMAGES, num_val=VAL_IMAGES)
        prepare(root, root / "prepared", PrepareConfig(pack=False))
        yield open_dataset(root, root / "prepared")


def _print_figures(call: Call, figures: Figures) -> None:
    width = max(map(len, figures)) + 2
    call.console.result(figures, "\n".join(f"{name:<{width}}{v}" for name, v in figures.items()))
