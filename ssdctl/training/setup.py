"""The parts of a run before its first step: dataset, plan, network, first weights.

`Trainer.open` calls these functions in the order of the checks.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ssdctl.checkpoint.file import (
    load_checkpoint,
    load_state,
    same_classes,
    with_classes,
    with_counters,
)
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.checkpoint.format import Architecture, NetworkWeights
from ssdctl.checkpoint.locate import (
    check_weight_sources,
    continued_config,
    locate_checkpoint,
    resolve_source,
)
from ssdctl.config import Config, TrainConfig
from ssdctl.config.render import values
from ssdctl.config.settings import all_settings
from ssdctl.data.dataset import WHAT_IS_DROPPED, require_split, warning_without_validation
from ssdctl.data.open_dataset import DatasetSize, fold_rows, without_images
from ssdctl.data.sources import is_prepared
from ssdctl.data.store import Split, open_splits
from ssdctl.data.store_folder import dataset_folders, require_dataset
from ssdctl.data.tiles import tiled, tiling_of
from ssdctl.device import Device
from ssdctl.distributed import Ranks, collectives
from ssdctl.distributed.collectives import main_first, open_on_all_ranks
from ssdctl.download.pinned_files import DetectorSource
from ssdctl.errors import DataError, NetworkError
from ssdctl.evaluation.choices import warning_of_images
from ssdctl.input.open import check_pipeline, fake_split
from ssdctl.model.pretrained import check_file, fetch_weights
from ssdctl.model.ssd300 import SSD300, load_backbone, network_of
from ssdctl.runs.folder import run_dir
from ssdctl.runtime.progress import Progress
from ssdctl.runtime.system import Overridden, with_defaults
from ssdctl.training.description import warnings_of_unreached
from ssdctl.training.memory import architecture_of, plan_on_device
from ssdctl.training.observers import Observer
from ssdctl.training.observers.mllog import MLLog
from ssdctl.training.observers.trackers import Trackers, find_trackers
from ssdctl.training.plan import Network, Plan, check_settings, unfitted, with_network

log = logging.getLogger(__name__)
LOOP = {  # settings on which steps, exchanges and detections depend, besides the compared ones
    *("train.epochs", "train.steps", "train.batch_size", "train.accumulate", "train.on_nonfinite"),
    *("train.execution", "train.overlap_gradients", "train.log_every", "train.save_every"),
    *("train.eval_every", "train.eval_at", "evaluate.score_threshold", "evaluate.nms_iou"),
}
InitReader = Callable[[], NetworkWeights]  # reads the checkpoint of --init


class Splits(NamedTuple):
    """The images of a run."""

    train: Split
    val: Split | None
    val_rows: NDArray[np.int64] | None = None  # the images of `val` to score; None: all

    @property
    def scored_rows(self) -> NDArray[np.int64]:
        """The rows of `val` that are scored: images, not tiles."""
        if self.val_rows is not None:
            return self.val_rows
        return np.arange(0 if self.val is None else self.val.num_images)


def init_reader(config: Config) -> InitReader:
    """Return a function that reads the checkpoint of `--init`, once."""
    init, mirror = str(config.train.init), config.download.mirror
    return functools.cache(lambda: load_checkpoint(locate_checkpoint(init, mirror=mirror)))


def open_dataset(
    config: Config, device: Device, ranks: Ranks, progress: Progress, init: InitReader
) -> tuple[Config, Splits]:
    """Return the splits to train and to validate on, and the config with the network of `--init`.

    What does not depend on the dataset is checked first: preparing it may take long.
    """
    if ranks.is_main:
        check_weight_sources(config)
    check_pipeline(config.train.pipeline, config.train.augment)
    find_trackers(config.train)
    check_settings(config, device)
    if not (config.train.fake_data or config.is_chosen("data.root")):
        require_dataset(msgspec.structs.replace(config.data, root=None))
    if config.train.init is not None:
        network = collectives.from_first(lambda: _network_of(config, init), ranks)
        config = with_network(config, network)
        if network.tiling is not None and config.data.tile and not config.is_chosen("data.tile"):
            text = "training in tiles of %d pixels, as %s was (--tile 0: off)"
            log.info(text, config.data.tile, config.train.init)
    return config, _open_splits(config, ranks, progress)


def plan_run(config: Config, splits: Splits, device: Device, ranks: Ranks) -> Plan:
    """Plan a run on an open device and dataset; all ranks return the same plan."""
    _require_same(config, splits, ranks)
    before = collectives.from_first(lambda: continued_config(config), ranks)
    names = [c.name for c in splits.train.classes]
    train = splits.train
    size = DatasetSize(len(train.trainable), len(train.background), len(splits.scored_rows), names)
    return plan_on_device(config, device, ranks, size, len(names) + 1, before=before)


def _require_same(config: Config, splits: Splits, ranks: Ranks) -> None:
    """Check that the ranks take the same steps on the same images and labels."""
    if ranks.is_single_process:
        return
    facts = {p: v for p, v in values(config).items() if all_settings()[p].is_compared or p in LOOP}
    for name, split in (("train", splits.train), ("val", splits.val)):
        facts[f"checksum of {name}"] = None if split is None else split.digest()
    facts["train.out"] = str(config.train.out)
    facts["classes"] = [c.name for c in splits.train.classes]
    facts["train.init is chosen"] = config.train.init is not None
    facts["model.weights"] = "none" if config.model.weights_name is None else "a file or name"
    collectives.require_same(facts, ranks)


def limited(splits: Splits, plan: Plan) -> Splits:
    """Return the images that a run trains and evaluates on: `--limit-train`, `--overfit`."""
    config, train = plan.config.train, splits.train
    is_limited = (config.limit_train or config.overfit) is not None
    rows = train.background[: plan.background if is_limited or not plan.background else None]
    train = train._replace(trainable=train.trainable[: plan.trainable], background=rows)
    if config.overfit is None or config.fake_data:
        return Splits(train, splits.val, splits.val_rows)
    images = [train.image_of(int(row))[0] for row in [*train.trainable, *train.background]]
    return Splits(train, train, np.unique(images))


def build_network(plan: Plan, splits: Splits, device: Device, ranks: Ranks) -> SSD300:
    """Return a network on the device, with random weights that depend only on the seed."""
    config = plan.config.train
    architecture = architecture_of(plan.config, len(splits.train.classes) + 1)
    model = frozen_network(architecture, config)
    model.classes, model.tiling = splits.train.classes, tiling_of(plan.config)
    if config.sync_bn:
        model = with_sync_bn(model, device, ranks)
    return device.place(model)


def frozen_network(architecture: Architecture, config: TrainConfig) -> SSD300:
    """Return a network with random weights, frozen where a run with this config does not train."""
    model = network_of(architecture, config.seed)
    if config.freeze_stem:
        model.freeze_stem()
    model.freeze(config.freeze)
    if config.freeze_norm:
        model.freeze_norm()
    return model


def observers_of(plan: Plan) -> list[Observer]:
    """Return MLPerf's log and the trackers that a config names."""
    config = plan.config.train
    observers: list[Observer] = [] if config.mllog is None else [MLLog()]
    if trackers := find_trackers(config):
        uploads, longest_wait_s = config.upload_checkpoints, config.rank_timeout / 2
        observers.append(Trackers(trackers, uploads=uploads, longest_wait_s=longest_wait_s))
    return observers


def warn_about(plan: Plan, splits: Splits, step: int) -> None:
    """Warn about what the run does not reach from a step, and about validation images."""
    for warning in warnings_of_unreached(plan, step):
        log.warning("%s", warning)
    if splits.val is None and not plan.config.train.fake_data:
        folders = dataset_folders(plan.config.data)
        log.warning("%s", warning_without_validation(*folders, splits.train.num_images))
    if splits.val is not None and splits.val_rows is None:
        for warning in splits.val.warnings:
            log.warning("%s", warning)


def planned_config(config: Config) -> Config:
    """Return the config with the network of `--init`, or of the run to resume.

    A model of the Hub is not fetched for a plan: its network is not known.
    """
    if config.train.init is None:
        return config
    if not run_dir(config).resumable():
        source = resolve_source(str(config.train.init))
        if isinstance(source, DetectorSource):
            return with_network(config, Network(source.backbone, source.extra_norm))
        if not isinstance(source, Path):
            return unfitted(config)
    return with_network(config, _network_of(config, init_reader(config)))


def _network_of(config: Config, init: InitReader) -> Network:
    newest, _ = CheckpointFolder(run_dir(config).path, config.train.keep).newest_intact()
    checkpoint = newest or init()
    architecture = checkpoint.architecture
    return Network(architecture.backbone, architecture.extra_norm, checkpoint.tiling)


def with_sync_bn(model: SSD300, device: Device, ranks: Ranks) -> SSD300:
    """Return the network with batch norm over the images of all ranks."""
    if ranks.is_single_process:
        return model
    # PyTorch cannot compile its own: https://github.com/pytorch/pytorch/issues/156680
    if device.has_sync_bn and device.execution == "eager":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    from ssdctl.model.distributed_norm import convert_batch_norms

    group = collectives.device_group(ranks)
    convert_batch_norms(model, ranks.world_size, "" if group is None else group.group_name)
    return model


_KERNELS = Overridden(
    lambda: (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    ),
    lambda values: _choose_kernels(*values),
)


def _choose_kernels(is_deterministic: bool, only_warns: bool, benchmark: bool) -> None:
    torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
    torch.backends.cudnn.benchmark = benchmark


@contextlib.contextmanager
def deterministic_kernels(is_on: bool) -> Iterator[None]:
    """Let PyTorch choose deterministic kernels, or fail if there is none, during the block."""
    if not is_on:
        yield
        return
    # The variable is read at the first use.
    with (
        with_defaults({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        _KERNELS.by((True, False, False)),
    ):
        yield


def _open_splits(config: Config, ranks: Ranks, progress: Progress) -> Splits:
    root, folder = dataset_folders(config.data)
    if config.train.fake_data and not root.exists():
        log.info("fake data: no dataset at %s, using COCO's number of images and classes", root)
        return Splits(fake_split(), None)
    tiling = tiling_of(config)
    splits = open_on_all_ranks(root, folder, config.prepare, ranks, progress)
    splits = {name: tiled(split, tiling) for name, split in splits.items()}
    if config.train.fake_data:
        log.info("fake data: no image is read, nothing is evaluated")
        splits.pop("val", None)
    train, val = require_split(splits, "train", root), splits.get("val")
    if not len(train.trainable):
        raise DataError(f"{root}: no training image has a box to learn from", hint=WHAT_IS_DROPPED)
    if (rows := _held_rows(train, config)) is None:
        return Splits(train, val)
    fold = config.train.fold
    log.info("fold %s: %d training images are held out for validation", fold, len(rows))
    used = without_images(train, rows)
    if not len(used.trainable):
        raise DataError(f"{root}: no image with a box remains to train on without fold {fold}")
    return Splits(used, train, rows)


def _held_rows(train: Split, config: Config) -> NDArray[np.int64] | None:
    fold = config.train.fold
    if fold is None or config.train.fake_data:
        return None
    return fold_rows(train, fold, config.train.group)


def planned_warning_of_init(config: Config) -> str | None:
    """Return `warning_of_init` for a dataset that is prepared; nothing is written."""
    root, folder = dataset_folders(config.data)
    source = resolve_source(str(config.train.init))
    if not isinstance(source, Path) or not is_prepared(root, folder):
        return None
    splits = open_splits(root, folder)
    train = require_split(splits, "train", root)
    if (rows := _held_rows(train, config)) is None:
        return warning_of_init(config, Splits(train, splits.get("val")), init_reader(config))
    return warning_of_init(config, Splits(train, train, rows), init_reader(config))


def warning_of_init(config: Config, splits: Splits, init: InitReader) -> str | None:
    """Return a warning about images that the run of --init trained on and that are scored now.

    Args:
        splits: Of the dataset, before `limited`.
    """
    if splits.val is None or config.train.overfit is not None:
        return None
    root, _ = dataset_folders(config.data)
    return warning_of_images(init(), root, splits.val, splits.val_rows)


def load_first_weights(
    plan: Plan, model: SSD300, splits: Splits, ranks: Ranks, init: InitReader
) -> None:
    """Load the weights of a new run: those of `--init`, or pretrained backbone weights.

    Args:
        splits: Of the dataset, before `limited`.
    """
    config, classes = plan.config, splits.train.classes
    if config.train.init is not None:
        checkpoint = init()
        state = with_counters(checkpoint.model, model)
        log.info("starting from the weights of %s (step %s)", checkpoint.path, checkpoint.step)
        if (warning := warning_of_init(config, splits, init)) is not None:
            log.warning("%s", warning)
        if not same_classes(checkpoint, classes):
            state, kept = with_classes(checkpoint, model, classes)
            log.info(
                "%d classes in the checkpoint, %d in the dataset: starting with new class heads%s",
                checkpoint.architecture.num_classes - 1,
                len(classes),
                f", except for {', '.join(kept)}, which both have" if kept else "",
            )
        load_state(model, state, checkpoint.path)
        return
    name = config.model.weights_name
    is_file = name is not None and Path(name).is_file()
    # A file may have other folders on other nodes, but none may lack it: they would wait.
    collectives.require_same({"model.weights": "an existing file" if is_file else name}, ranks)
    if name is None:
        return
    if is_file:
        path = Path(name)
        check_file(path)
    else:
        # It is in the cache then; on another node that node's first process fetches it.
        fetch = functools.partial(_fetch_weights, name, config)
        path = main_first(fetch, fetch, ranks)
    load_backbone(model, path)


def _fetch_weights(name: str, config: Config) -> Path:
    try:
        return fetch_weights(name, mirror=config.download.mirror)
    except NetworkError as error:
        others = "or train without them: --init FILE, or --backbone-weights none"
        raise NetworkError(str(error), hint=f"{error.hint}; {others}") from None
