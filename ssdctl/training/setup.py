"""Open a run before its first step, in the order of the checks: options, device, dataset, weights.

with open_trainer(config, emit=show, progress=progress_bar) as trainer:
    trainer.run()
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from ssdctl.checkpoint import Checkpoint
from ssdctl.checkpoint.file import (
    load_backbone,
    load_checkpoint,
    load_state,
    same_classes,
    with_classes,
    with_counters,
)
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.config import Config, TrainConfig
from ssdctl.data.dataset import WHAT_IS_DROPPED, require_split, warning_without_validation
from ssdctl.data.open_dataset import DatasetSize
from ssdctl.data.store import Split
from ssdctl.data.store_folder import dataset_folders, require_dataset
from ssdctl.device import Device, open_device
from ssdctl.distributed import collectives
from ssdctl.distributed.collectives import open_on_all_ranks, process_group, wait_for_main
from ssdctl.distributed.ranks import Ranks, find_ranks
from ssdctl.download.pinned_files import DetectorSource
from ssdctl.errors import DataError, IntegrityError, NetworkError
from ssdctl.inference.locate import locate_checkpoint, resolve_source
from ssdctl.input.fake import fake_split
from ssdctl.input.open import check_pipeline
from ssdctl.model.pretrained import check_file, fetch_weights, weights_of
from ssdctl.model.ssd300 import SSD300, Architecture
from ssdctl.runs.layout import exclusive_run, run_dir
from ssdctl.runs.metrics import Record
from ssdctl.runtime import signals
from ssdctl.runtime.progress import Progress, without_progress
from ssdctl.runtime.system import usable_cores
from ssdctl.training.description import warning_of_cut
from ssdctl.training.memory import architecture_of, out_of_memory_hints, plan_on_device
from ssdctl.training.optimizer import without_dynamo
from ssdctl.training.plan import Network, Plan, check_settings, settings_of_run
from ssdctl.training.resume import find_checkpoint
from ssdctl.training.trackers import find_trackers
from ssdctl.training.trainer import Trainer

log = logging.getLogger(__name__)
InitReader = Callable[[], Checkpoint]  # reads the checkpoint of --init


class OpenedRun(NamedTuple):
    """The parts of a run before its first step."""

    plan: Plan
    device: Device
    ranks: Ranks
    train: Split
    val: Split | None
    val_rows: NDArray[np.int64] | None  # the images of `val` to score; None: all
    architecture: Architecture
    model: SSD300
    threads: int
    memory_hints: Callable[[], contextlib.AbstractContextManager[None]]  # explains a full memory


@contextlib.contextmanager
def open_trainer(
    config: Config, *, emit: Callable[[Record], None], progress: Progress
) -> Iterator[Trainer]:
    """Open device, ranks, dataset, network and run folder for the duration of the block.

    Args:
        emit: Called with every record of metrics.jsonl after it is written, and with the records
            for the display that ssdctl/runs/display.py lists.

    Raises:
        UsageError: Another process trains in the run folder; or see `prepare_run`.
        IntegrityError: The checkpoint to continue from is damaged.
        DistributedError: Another rank was lost.
        Stopped: A signal came.
    """
    ranks, train = find_ranks(), config.train
    with signals.ending_at_once():
        device = open_device(train.device, ranks.local_rank, train.execution)
    with (
        deterministic_kernels(train.deterministic),
        without_dynamo(),
        process_group(ranks, device, train.rank_timeout),
        contextlib.ExitStack() as exit_stack,
    ):
        for notice in device.notices:
            log.warning("%s", notice)
        with signals.ending_at_once():
            init = _init_reader(config)
            shown = progress if ranks.is_main else without_progress
            opened = prepare_run(config, device, ranks, shown, init)
            if ranks.is_main:
                exit_stack.enter_context(exclusive_run(opened.plan.out))
                CheckpointFolder(opened.plan.out, opened.plan.config.train.keep).repair()
            checkpoint = find_checkpoint(opened)
            if checkpoint is None:
                load_first_weights(opened, init)
            del init  # its memory
            trainer = Trainer(opened, checkpoint, emit)
            exit_stack.callback(trainer.close)
            trainer.run_log.start(trainer.step)
            del checkpoint
        if warning := warning_of_cut(opened.plan):
            log.warning("%s", warning)
        if opened.val is None and not opened.plan.config.train.fake_data:
            root, _ = dataset_folders(opened.plan.config.data)
            log.warning("%s", warning_without_validation(root))
        if opened.val is not None and opened.val_rows is None:
            for warning in opened.val.warnings:
                log.warning("%s", warning)
        yield trainer


def _init_reader(config: Config) -> InitReader:
    init, mirror = str(config.train.init), config.download.mirror
    return functools.cache(lambda: load_checkpoint(locate_checkpoint(init, mirror=mirror)))


def prepare_run(
    config: Config, device: Device, ranks: Ranks, progress: Progress, init: InitReader
) -> OpenedRun:
    """Open the dataset, plan the run, build the network with random weights."""
    check_pipeline(config.train.pipeline)
    find_trackers(config.train)
    check_settings(config, device)  # before the dataset, which may take long to prepare
    if not (config.train.fake_data or config.is_chosen("data.root")):
        require_dataset(msgspec.structs.replace(config.data, root=None))
    train, val = _open_splits(config, ranks, progress)
    network = None
    before = collectives.broadcast(settings_of_run(config) if ranks.is_main else None, ranks)
    if _takes_network_of_init(config):
        network = collectives.broadcast(_network_of(config, init) if ranks.is_main else None, ranks)
    names = [c.name for c in train.classes]
    num_val = 0 if val is None else len(val.image_ids)
    size = DatasetSize(len(train.trainable), len(train.background), num_val, names)
    num_classes = len(names) + 1
    plan = plan_on_device(config, device, ranks, size, num_classes, before=before, network=network)
    train = _limited(train, plan)
    is_overfit = config.train.overfit is not None  # trains and evaluates on the same few images
    architecture = architecture_of(plan.config, num_classes)
    return OpenedRun(
        plan=plan,
        device=device,
        ranks=ranks,
        train=train,
        val=train if is_overfit else val,
        val_rows=np.concatenate([train.trainable, train.background]) if is_overfit else None,
        architecture=architecture,
        model=device.place(_new_model(architecture, plan.config.train, device, ranks)),
        threads=config.train.workers or usable_cores(ranks.world_size),
        memory_hints=functools.partial(out_of_memory_hints, plan, architecture, device),
    )


def _limited(train: Split, plan: Plan) -> Split:
    """Return the split with only the images that the run trains on."""
    config = plan.config.train
    is_limited = (config.limit_train or config.overfit) is not None
    rows = train.background[: plan.background if is_limited or not plan.background else None]
    return train._replace(trainable=train.trainable[: plan.trainable], background=rows)


def _new_model(
    architecture: Architecture, config: TrainConfig, device: Device, ranks: Ranks
) -> SSD300:
    torch.manual_seed(config.seed)
    model = architecture.build()
    if config.freeze_stem:
        model.freeze_stem()
    model.freeze(config.freeze)
    if config.freeze_norm:
        model.freeze_norm()
    return with_sync_bn(model, device, ranks) if config.sync_bn else model


def planned_network(config: Config) -> Network | None:
    """Return the network of `--init`, or of the run to resume; None for a model of the Hub.

    Raises:
        UsageError, IntegrityError: There is no such file or name, or it is damaged.
    """
    if not _takes_network_of_init(config):
        return None
    if not run_dir(config).step_checkpoints():
        source = resolve_source(str(config.train.init))
        if isinstance(source, DetectorSource):
            return Network(source.backbone, source.extra_norm)
        if not isinstance(source, Path):
            return None
    return _network_of(config, _init_reader(config))


def _takes_network_of_init(config: Config) -> bool:
    return config.train.init is not None and not config.is_chosen("train.preset")


def _network_of(config: Config, init: InitReader) -> Network:
    checkpoint, _ = CheckpointFolder(run_dir(config).path, config.train.keep).newest_intact()
    architecture = (checkpoint or init()).architecture
    return Network(architecture.backbone, architecture.extra_norm)


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


@contextlib.contextmanager
def deterministic_kernels(is_on: bool) -> Iterator[None]:
    """Let PyTorch choose deterministic kernels, or fail if there is none, during the block."""
    if not is_on:
        yield
        return
    variable = "CUBLAS_WORKSPACE_CONFIG"  # read at the first use
    workspace = os.environ.get(variable)
    was_on = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    os.environ.setdefault(variable, ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=warned_only)
        torch.backends.cudnn.benchmark = benchmark
        if workspace is None:
            os.environ.pop(variable, None)


def _open_splits(config: Config, ranks: Ranks, progress: Progress) -> tuple[Split, Split | None]:
    """Return the splits to train and to validate on, whose classes agree."""
    root, folder = dataset_folders(config.data)
    if config.train.fake_data and not root.exists():
        log.info("fake data: no dataset at %s, using COCO's number of images and classes", root)
        return fake_split(), None
    splits = open_on_all_ranks(root, folder, ranks, progress)
    if config.train.fake_data:
        log.info("fake data: no image is read, nothing is evaluated")
        splits.pop("val", None)
    train, val = require_split(splits, "train", root), splits.get("val")
    if not len(train.trainable):
        raise DataError(f"{root}: no training image has a box to learn from", hint=WHAT_IS_DROPPED)
    return train, val


def load_first_weights(opened: OpenedRun, init: InitReader) -> None:
    """Load the weights of a new run: those of `--init`, or pretrained backbone weights."""
    config, model, classes = opened.plan.config, opened.model, opened.train.classes
    if config.train.init is not None:
        checkpoint = init()
        _refuse_another_network(checkpoint, opened.architecture)
        state = with_counters(checkpoint.model, model)
        log.info("starting from the weights of %s (step %s)", checkpoint.path, checkpoint.step)
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
    name = weights_of(config.model)
    if name is None:
        return
    if Path(name).is_file():
        path = Path(name)
        check_file(path)
    else:
        if opened.ranks.is_main:
            _fetch_weights(name, config)
        wait_for_main(opened.ranks, "weights")
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
