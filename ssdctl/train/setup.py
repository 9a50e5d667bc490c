"""Prepare a run before its first step, in the order of the checks: options, device, dataset,
weights."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ssdctl.checkpoint.format import Architecture
from ssdctl.checkpoint.reader import (
    Checkpoint,
    load_backbone,
    load_state,
    read_checkpoint,
    same_classes,
    with_classes,
    with_counters,
)
from ssdctl.config import Config
from ssdctl.config.resolve import Resolved
from ssdctl.data.dataset import WHAT_IS_DROPPED, require_split
from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split
from ssdctl.data.store_folder import dataset_folders
from ssdctl.device.base import Device
from ssdctl.distributed import collectives
from ssdctl.distributed.process_group import wait_for_main
from ssdctl.distributed.ranks import Ranks
from ssdctl.download.backbone_weights import fetch_weights, weights_of
from ssdctl.errors import DataError, IntegrityError, NetworkError, UsageError
from ssdctl.inference.model_source import locate_checkpoint
from ssdctl.input.fake import fake_split
from ssdctl.input.pipelines import check_pipeline
from ssdctl.model.ssd300 import SSD300
from ssdctl.runs.checkpoints import CheckpointDir
from ssdctl.runs.default_folder import run_dir
from ssdctl.runtime.cores import usable_cores
from ssdctl.runtime.progress import Progress
from ssdctl.train.memory import with_batch_size
from ssdctl.train.schedule import TrainSchedule, make_plan
from ssdctl.train.small_data import adapt_to_data, is_default, may_shorten_warmup
from ssdctl.train.trackers.registry import find_trackers

log = logging.getLogger(__name__)


class Setup(NamedTuple):
    """The parts of a run before its first step."""

    config: Config
    resolved: Resolved  # the same config, with the source of each value
    device: Device
    ranks: Ranks
    precision: str
    plan: TrainSchedule
    train: Split
    val: Split | None
    val_rows: NDArray[np.int64] | None  # the images of `val` to score; None: all
    architecture: Architecture
    model: SSD300
    out: Path
    threads: int


def choose_precision(precision: str, device: Device) -> str:
    """Return the precision of the network: fp32, bf16 or fp16.

    Raises:
        UsageError: The device cannot compute in it.
    """
    if precision == "auto":
        return device.auto_precision
    if precision not in device.precisions:
        flags = " or ".join(f"--{p}" for p in device.precisions)
        raise UsageError(
            f"device {device.name} does not compute in {precision}", hint=f"choose {flags}"
        )
    return precision


def with_usable_precision(resolved: Resolved, device: Device) -> tuple[Resolved, str | None]:
    """Replace a preset's precision that the device lacks by the device's best.

    What the user asked for stays, and is refused later.

    Returns:
        The settings, and a message for the user if one was replaced.
    """
    requested, source = resolved.config.train.precision, resolved.sources["train.precision"]
    if requested in ("auto", *device.precisions) or not source.startswith("preset "):
        return resolved, None
    notice = (
        f"{source} trains in {requested}, which device {device.name} lacks: {{}} is used instead"
    )
    precision = device.auto_precision
    return resolved.with_value("train.precision", precision), notice.format(precision)


def prepare_run(resolved: Resolved, device: Device, ranks: Ranks, progress: Progress) -> Setup:
    """Open the dataset, compute the schedule, build the network with random weights.

    Settings that the user did not choose are adapted to the number of training images and to the
    checkpoint of `--init`.

    Raises:
        UsageError, DataError: See the functions called.
    """
    config = resolved.config
    check_pipeline(config.train.pipeline)
    find_trackers(config.train)
    if config.train.deterministic:
        make_deterministic()  # first: the GPU's libraries read it at their first use
    precision = choose_precision(config.train.precision, device)
    # The resolved `auto` belongs to the run: a resume on another device compares it.
    resolved = resolved.with_value("train.precision", precision)
    train, val = _open_splits(config, ranks, progress)
    train = train._replace(trainable=train.trainable[: config.train.limit_train])
    val_rows = None
    if config.train.overfit is not None:  # train and evaluate on the same few images
        train = train._replace(trainable=train.trainable[: config.train.overfit])
        val, val_rows = train, train.trainable
    resolved, _ = adapt_to_data(
        _with_network_of_init(resolved, ranks), len(train.trainable), ranks.world_size
    )
    config = resolved.config
    architecture = Architecture(
        config.model.backbone, config.model.extra_norm, len(train.classes) + 1
    )
    config = with_batch_size(config, architecture, device, ranks, precision)
    plan = make_plan(
        config.train,
        len(train.trainable),
        ranks.world_size,
        may_shorten_warmup=may_shorten_warmup(resolved),
    )

    torch.manual_seed(config.train.seed)  # the same first weights on every rank
    model = architecture.build()
    if config.train.freeze_stem:
        model.freeze_stem()
    model.freeze(config.train.freeze)
    if config.train.freeze_norm:
        model.freeze_norm()
    if config.train.sync_bn:
        model = with_sync_bn(model, device, ranks)
    return Setup(
        config=config,
        resolved=resolved._replace(config=config),
        device=device,
        ranks=ranks,
        precision=precision,
        plan=plan,
        train=train,
        val=val,
        val_rows=val_rows,
        architecture=architecture,
        model=device.place(model),
        out=run_dir(config).path,
        threads=config.train.workers or usable_cores(ranks.world_size),
    )


def _with_network_of_init(resolved: Resolved, ranks: Ranks) -> Resolved:
    """Return the settings with the network of the checkpoint of `--init`, or of the run to resume.

    Only what neither the user nor a preset that the user named chose is replaced.

    Raises:
        UsageError, NetworkError, IntegrityError: The checkpoint is not available, or damaged.
    """
    config = resolved.config
    if config.train.init is None or not is_default(resolved, "preset"):
        return resolved
    network = None
    if ranks.is_main:
        network = _network_of(config)
    network = collectives.broadcast(network, ranks)
    assert network is not None
    for path, value in zip(("model.backbone", "model.extra_norm"), network, strict=True):
        if resolved.sources[path].startswith("preset "):
            resolved = resolved.with_value(path, value, source="checkpoint of --init")
    return resolved


def _network_of(config: Config) -> tuple[str, str]:
    """Return backbone and extra_norm of the run to resume, else of the checkpoint of `--init`."""
    checkpoint, _ = CheckpointDir(run_dir(config).path, config.train.keep).newest_intact()
    if checkpoint is None:
        assert config.train.init is not None
        path = locate_checkpoint(config.train.init, mirror=config.download.mirror)
        checkpoint = read_checkpoint(path)
    return checkpoint.architecture.backbone, checkpoint.architecture.extra_norm


def with_sync_bn(model: SSD300, device: Device, ranks: Ranks) -> SSD300:
    """Return the network with batch norm over the images of all ranks."""
    if ranks.is_single_process:
        return model
    # PyTorch cannot compile its own: https://github.com/pytorch/pytorch/issues/156680
    if device.has_sync_bn and device.execution == "eager":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    from ssdctl.model.distributed_norm import convert_batch_norms

    convert_batch_norms(model, ranks.world_size)
    return model


def make_deterministic() -> None:
    """Let PyTorch choose deterministic kernels, or fail if there is none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def _open_splits(config: Config, ranks: Ranks, progress: Progress) -> tuple[Split, Split | None]:
    """Return the splits to train and to validate on; with fake data, only their sizes."""
    root, folder = dataset_folders(config.data)
    if config.train.fake_data and not root.exists():
        log.info("fake data: no dataset at %s, using COCO's number of images and classes", root)
        return fake_split(), None
    if ranks.is_main:  # prepares it for the other ranks
        splits = open_dataset(root, folder, progress=progress)
    wait_for_main(ranks, "dataset")
    if not ranks.is_main:
        splits = open_dataset(root, folder, check_images=False)
    if config.train.fake_data:
        log.info("fake data: no image is read, nothing is evaluated")
        splits.pop("val", None)
    return _checked_splits(splits, root)


def _checked_splits(splits: dict[str, Split], root: Path) -> tuple[Split, Split | None]:
    """Return the splits to train and to validate on, after checking that their classes agree."""
    train, val = require_split(splits, "train", root), splits.get("val")
    if not len(train.trainable):
        raise DataError(f"{root}: no training image has a box to learn from", hint=WHAT_IS_DROPPED)
    if val is not None and val.classes != train.classes:
        listed = [", ".join(f"{c.name} ({c.id})" for c in s.classes) for s in (train, val)]
        raise DataError(
            f"{root}: the splits list different categories, or in another order: "
            f"train {listed[0]}; val {listed[1]}",
            hint="give both annotation files the same list of categories",
        )
    return train, val


def load_first_weights(setup: Setup) -> None:
    """Load the weights of a new run: those of `--init`, or pretrained backbone weights.

    Raises:
        UsageError, NetworkError, IntegrityError: They are not available, or do not fit.
    """
    config, model, classes = setup.config, setup.model, setup.train.classes
    if config.train.init is not None:
        checkpoint = read_checkpoint(
            locate_checkpoint(config.train.init, mirror=config.download.mirror)
        )
        _refuse_another_network(checkpoint, setup.architecture)
        state = with_counters(checkpoint.model, model)
        log.info("starting from the weights of %s (step %s)", checkpoint.path, checkpoint.step)
        if not same_classes(checkpoint, classes):
            state, kept = with_classes(checkpoint, model, classes)
            log.info(
                "it has %d classes, the dataset has %d: the class heads are re-initialised%s",
                checkpoint.architecture.num_classes - 1,
                len(classes),
                f", except for {', '.join(kept)}, which both have" if kept else "",
            )
        load_state(model, state, checkpoint.path)
        return
    name = weights_of(config.model)
    if name is None:
        return
    if Path(name).is_file():
        path = Path(name)
    else:
        if setup.ranks.is_main:
            _fetch_weights(name, config)
        wait_for_main(setup.ranks, "weights")
        # It is in the cache now; on another node that node's first process fetches it.
        path = _fetch_weights(name, config)
    load_backbone(model, path)


def _fetch_weights(name: str, config: Config) -> Path:
    try:
        return fetch_weights(name, mirror=config.download.mirror)
    except NetworkError as error:
        others = "or train without them: --init FILE, or --backbone-weights none"
        raise NetworkError(str(error), hint=f"{error.hint}; {others}") from None


def _refuse_another_network(checkpoint: Checkpoint, expected: Architecture) -> None:
    saved = checkpoint.architecture
    if (saved.backbone, saved.extra_norm) != (expected.backbone, expected.extra_norm):
        raise IntegrityError(
            f"{checkpoint.path}: does not fit the network: it is {saved.backbone} with extra_norm "
            f"{saved.extra_norm}, the run has {expected.backbone} with {expected.extra_norm}",
            hint=f"--backbone {saved.backbone} --extra-norm {saved.extra_norm}",
        )
