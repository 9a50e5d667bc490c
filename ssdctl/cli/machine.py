"""`ssdctl doctor` and `ssdctl benchmark`."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from ssdctl.cli.command import Call, command, command_group, stoppable
from ssdctl.cli.console import aligned, is_encodable, painted
from ssdctl.errors import UsageError
from ssdctl.runtime.system import tune_process

if TYPE_CHECKING:
    from ssdctl.benchmark.data import Measurements
    from ssdctl.data.store import Split
    from ssdctl.doctor import Check

DEFAULT_WIDTH, MAX_WIDTH = 100, 120  # columns; the default is for output that is not a terminal
group = command_group(
    "benchmark", "This machine", "Benchmark data loading, training, and evaluation."
)

TRAIN_IMAGES, VAL_IMAGES = 256, 64  # generated if there is no --data
Seconds = Annotated[
    float, Option("--seconds", help="Seconds per measurement", metavar="S", min=0.1)
]


@command(
    "doctor",
    panel="This machine",
    settings="data.root data.store download.mirror",
    examples=[
        "ssdctl doctor",
        "ssdctl doctor -v   # every check",
        "ssdctl doctor --network --self-test",
        "ssdctl doctor --data /data/coco --json",
    ],
)
def doctor(
    call: Call,
    network: Annotated[
        bool, Option("--network", help="Also connect to the download hosts")
    ] = False,
    self_test: Annotated[
        bool, Option("--self-test", help="Also test two ranks and a training step")
    ] = False,
) -> None:
    """Check this machine and suggest fixes.

    Exits with 2 if a check fails. Nothing is changed.
    Output contains no secrets; safe to paste into an issue.
    """
    from ssdctl.doctor import FAIL
    from ssdctl.doctor.run_checks import examine

    with stoppable("nothing was changed"):
        checks = examine(call.config, network=network, self_test=self_test)
    text = _text(call, checks)
    if text or call.console.as_json:
        call.console.result([check._asdict() for check in checks], text, is_painted=True)
    if any(check.state == FAIL for check in checks):
        raise SystemExit(UsageError.exit_code)


def _text(call: Call, checks: list[Check]) -> str:
    from ssdctl.doctor.run_checks import ASCII_MARKS, MARKS, problems, to_text, without_secrets

    width = min(shutil.get_terminal_size((DEFAULT_WIDTH, 24)).columns, MAX_WIDTH)
    if call.console.quiet:
        return problems(checks, width, painted)
    data, has_dataset = call.config.data.root, any(check.name == "store" for check in checks)
    options = f" --data {shlex.quote(data)}" if data else ""
    command = f"ssdctl train{options} --dry-run" if has_dataset else "ssdctl demo"
    has_marks = is_encodable("".join(MARKS.values()), sys.stdout)
    marks = MARKS if has_marks else ASCII_MARKS
    command = without_secrets(command)
    return to_text(checks, width, command, painted, verbose=call.console.verbose, marks=marks)


@command(
    "data",
    group,
    settings=(
        "data.root data.store train.workers train.augment train.seed train.pipeline train.execution"
    ),
    examples=[
        "ssdctl benchmark data",
        "ssdctl benchmark data --data /data/coco --workers 8",
        "ssdctl benchmark data --execution compile   # the full pipeline, compiled as in training",
    ],
)
def data(
    call: Call,
    seconds: Seconds = 5.0,
) -> None:
    """Benchmark data loading on the CPU.

    The host stage reads, crops, decodes and resizes images: all that the CPU does in training. The
    full pipeline adds colors, normalization and targets.
    """
    if call.config.train.pipeline != "dali":  # as in training
        tune_process()
    from ssdctl.benchmark.data import benchmark_data

    with _splits(call) as splits:
        metrics = benchmark_data(_train_split(call, splits), call.config, seconds)
    call.console.info(
        f"{metrics['workers']} threads load {metrics['images_per_second']:,} img/s: enough if the "
        "GPUs of this machine train at most that many in total"
    )
    _print_metrics(call, metrics)


@command(
    "train",
    group,
    settings=(
        "data.root data.store model.backbone model.extra_norm train.preset train.batch_size "
        "train.precision train.device train.execution train.tf32 train.workers train.pipeline"
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
        split = _train_split(call, splits) if splits else None
        metrics = benchmark_train(split, call.config, seconds)
    if metrics is not None:
        _print_metrics(call, metrics)


@command(
    "evaluate",
    group,
    settings=(
        "data.root data.store model.backbone evaluate.split evaluate.batch_size "
        "evaluate.precision evaluate.device evaluate.workers evaluate.score_threshold "
        "evaluate.nms_iou"
    ),
    examples=["ssdctl benchmark evaluate", "ssdctl benchmark evaluate --data /data/coco"],
)
def evaluate(call: Call, seconds: Seconds = 5.0) -> None:
    """Benchmark evaluation: images per second, detection, and COCO scoring."""
    tune_process()
    from ssdctl.benchmark.evaluate import benchmark_evaluate
    from ssdctl.data.dataset import require_split
    from ssdctl.data.store_folder import dataset_folders

    with _splits(call) as splits:
        root, _ = dataset_folders(call.config.data)
        split = require_split(splits, call.config.evaluate.split, root)
        _print_metrics(call, benchmark_evaluate(split, call.config, seconds))


@contextlib.contextmanager
def _splits(call: Call) -> Iterator[dict[str, Split]]:
    from ssdctl.config import PrepareConfig
    from ssdctl.data import shapes
    from ssdctl.data.open_dataset import open_dataset
    from ssdctl.data.prepare import prepare
    from ssdctl.data.store_folder import dataset_folders, default_root

    if call.config.data.root is not None or default_root().exists():
        root, folder = dataset_folders(call.config.data)
        yield open_dataset(root, folder, call.config.prepare, progress=call.console.progress)
        return
    call.config.require_not_given(["data.store"], "is for a dataset", "add --data DIR")
    with tempfile.TemporaryDirectory(prefix="ssdctl-benchmark-") as temporary:
        call.console.info("no dataset: measuring on generated shapes")
        root = Path(temporary)
        shapes.generate(root, num_train=TRAIN_IMAGES, num_val=VAL_IMAGES)
        prepare(root, root / "prepared", PrepareConfig(pack=False))
        yield open_dataset(root, root / "prepared")


def _train_split(call: Call, splits: dict[str, Split]) -> Split:
    from ssdctl.data.dataset import require_split
    from ssdctl.data.store_folder import dataset_folders

    return require_split(splits, "train", dataset_folders(call.config.data)[0])


def _print_metrics(call: Call, metrics: Measurements) -> None:
    call.console.result(metrics, aligned([(name, str(v)) for name, v in metrics.items()]))
