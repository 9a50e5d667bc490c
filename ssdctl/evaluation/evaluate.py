"""Score a checkpoint, all checkpoints of a run, or a file of detections.

for evaluation in evaluate_files([find_checkpoint("runs/a")], config, progress=progress_bar):
    evaluation.metrics["AP"]

A file of detections is scored without torch.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ssdctl.config import Config
from ssdctl.config.resolve import of_call
from ssdctl.data.annotations import Annotations
from ssdctl.data.dataset import require_split
from ssdctl.data.duplicates import duplicate_warnings
from ssdctl.data.formats import coco
from ssdctl.data.index import index_path, last_made, require_metadata
from ssdctl.data.open_dataset import annotations_of, fold_rows, without_division
from ssdctl.data.sources import has_dataset, is_prepared
from ssdctl.data.store_folder import dataset_folders
from ssdctl.data.tiles import tiled, tiling_of
from ssdctl.distributed import SINGLE_PROCESS, Ranks, find_ranks
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.evaluation.analysis import compare, score_and_resample
from ssdctl.evaluation.choices import (
    choose_data,
    choose_fold,
    choose_precision,
    dataset_category_ids,
    name_of_images,
    require_images,
    rows_to_score,
    trained_on,
    warn_of_images,
)
from ssdctl.evaluation.coco_ap import Detections, ground_truth, read_detections, read_ground_truth
from ssdctl.evaluation.resample import Draws
from ssdctl.files import require_own_file, write_bytes
from ssdctl.runs.evaluation import Comparison, Evaluation, EvaluationInfo
from ssdctl.runtime.plugins import FORMATS, built_in
from ssdctl.runtime.progress import Progress
from ssdctl.runtime.system import usable_cores

if TYPE_CHECKING:
    from ssdctl.checkpoint.file import Source
    from ssdctl.checkpoint.format import ModelFile, NetworkWeights, OnnxGraph
    from ssdctl.device import Device
    from ssdctl.inference.detector import DetectorBackend

log = logging.getLogger(__name__)
RESULTS = r'\s*\[\s*(\]|\{[^{}]*"image_id")'  # the beginning of COCO's results format
NETWORK_SETTINGS = (
    *("data.tile", "data.tile_overlap", "evaluate.precision", "evaluate.nms_iou"),
    *("evaluate.batch_size", "evaluate.device", "evaluate.workers"),
)


def evaluate_files(
    files: Sequence[Source],
    config: Config,
    *,
    progress: Progress,
    detections_file: Path | None = None,
    is_distributed: bool = True,
    on_detected: Callable[[DetectedSplit], None] | None = None,
    on_scored: Callable[[Evaluation], None] = lambda _: None,
) -> Iterator[Evaluation]:
    """Score checkpoints on all ranks, or one file of detections; every rank yields the results.

    A checkpoint may also be a network in memory. All ranks detect with the first one's.
    The detections of one checkpoint are written to `detections_file` in COCO's results format.
    `on_detected` and `on_scored` get the detections and the score of each, on the first rank.
    With `is_distributed=False` this rank scores all images, and the others need not call it.

    Raises:
        UsageError: `detections_file` is given for a file of detections, or for several checkpoints.
    """
    results = _detections_in(files[0])
    if detections_file is not None and (results or len(files) > 1):
        named = ", ".join(map(str, files))
        raise UsageError(
            f"--detections writes the detections of one checkpoint, not of {named}",
            hint="pass one checkpoint",
        )
    if results is not None:
        _require_no_network_settings(results, config)
        read = _read_results(results, config)
        if on_detected is not None:
            on_detected(read)
        evaluation = read.score(verify=config.evaluate.verify)
        if find_ranks().is_main or not is_distributed:
            on_scored(evaluation)
        yield evaluation
        return
    from ssdctl.distributed.collectives import broadcast, from_first

    with _joined_ranks(config, is_distributed) as (device, ranks):
        _require_target(detections_file)
        if isinstance(files[0], Path):  # a training that goes on saves and deletes checkpoints
            files = from_first(lambda: files, ranks)
        for file in files:
            reading = functools.partial(_read_unless_deleted, file, may_be_deleted=len(files) > 1)
            checkpoint = from_first(reading, ranks)
            if checkpoint is None:
                log.warning("%s: skipped, training has deleted it (--keep)", file)
                continue
            found = detect_on_split(checkpoint, config, device, progress=progress, ranks=ranks)
            if found is not None and on_detected is not None:
                on_detected(found)
            scored = None if found is None else _score(found, config, detections_file)
            if scored is not None:
                on_scored(scored)
            scored = broadcast(scored, ranks)
            assert scored is not None
            yield scored


def _require_target(detections_file: Path | None) -> None:
    """Refuse a target before the detection, which may take hours."""
    if detections_file is not None:
        require_own_file(detections_file, "--detections", RESULTS)


def evaluate_folds(
    files: Sequence[Path],
    config: Config,
    *,
    progress: Progress,
    detections_file: Path | None = None,
    on_detected: Callable[[DetectedSplit], None] | None = None,
) -> Iterator[Evaluation]:
    """Score the checkpoints of all folds as one set: each on the images that it did not train on.

    Raises:
        UsageError: They are not the K folds of one dataset.
    """
    from ssdctl.checkpoint.file import read_model
    from ssdctl.distributed.collectives import broadcast, from_first

    if results := [file for file in files if _detections_in(file)]:
        raise UsageError(
            f"{results[0]}: a file of detections must be the only argument; several are folds",
            hint="name the file, or the K runs of --fold 1/K to K/K",
        )
    with _joined_ranks(config) as (device, ranks):
        _require_target(detections_file)
        read = from_first(lambda: [read_model(file) for file in files], ranks)
        _check_folds(read, config)
        config = _with_data_of(read, config)
        how: dict[str, Any] = {"progress": progress, "ranks": ranks, "only_fold": True}
        parts = [detect_on_split(checkpoint, config, device, **how) for checkpoint in read]
        found = [part for part in parts if part is not None]
        evaluation = None
        if found:
            joined = _joined(found)
            if on_detected is not None:
                on_detected(joined)
            evaluation = _score(joined, config, detections_file)
        evaluation = broadcast(evaluation, ranks)
        assert evaluation is not None
        yield evaluation


def _check_folds(checkpoints: Sequence[ModelFile], config: Config) -> None:
    settings = [checkpoint.run_settings or {} for checkpoint in checkpoints]
    names = ", ".join(str(checkpoint.path) for checkpoint in checkpoints)
    folds = [str(s.get("train.fold") or "none") for s in settings]
    count = folds[0].partition("/")[2]
    if sorted(folds) != sorted(f"{n}/{count}" for n in range(1, len(folds) + 1)) or count != str(
        len(folds)
    ):
        raise UsageError(
            f"{names}: not all folds of one training (their folds are {', '.join(folds)})",
            hint="name the K runs of --fold 1/K to K/K, or one run",
        )
    if len({s.get("train.group") for s in settings}) > 1:
        raise UsageError(f"{names}: folds of different groups (--group)")
    if config.is_chosen("evaluate.split"):
        raise UsageError(
            f"{names}: the folds are scored together on the images that each did not train on, "
            "not on another split",
            hint="leave --split out, or name one run",
        )


def _with_data_of(checkpoints: Sequence[ModelFile], config: Config) -> Config:
    """Return the config with one dataset to score checkpoints on, as if the call named it.

    It is that of the first one. If that is unknown or gone, it is the config's, else that of
    another one.
    """
    first, *others = checkpoints
    own = ((c, trained_on(c)) for c in (first, *(others if config.data.root is None else ())))
    has_data = (c for c, data in own if data.root and has_dataset(*dataset_folders(data)))
    chosen = next(has_data, first)
    data = choose_data(chosen, config)
    if chosen is not first:
        log.info("using the dataset of %s: %s", chosen.path, data.root)
    config = config.with_value("data.root", data.root, of_call("--data"))
    return config.with_value("data.store", data.store)


def _joined(parts: Sequence[DetectedSplit]) -> DetectedSplit:
    first, facts = parts[0].about, dict[str, Any]()
    for name in ("step", "epoch", "precision", "score_threshold"):
        values = {getattr(part.about, name) for part in parts}
        facts[name] = values.pop() if len(values) == 1 else None
    about = msgspec.structs.replace(
        first,
        **facts,
        source=", ".join(part.about.source for part in parts),
        warnings=list(dict.fromkeys(w for part in parts for w in part.about.warnings)),
    )
    return DetectedSplit(
        parts[0].truth,
        Detections.joined([part.detections for part in parts]),
        np.concatenate([part.image_ids for part in parts]),
        about,
    )


def compare_files(a: Path, b: Path, config: Config, *, progress: Progress) -> Comparison | None:
    """Compare two checkpoints, or files of detections, on the same images; None on further ranks.

    The dataset is that of the config, else of the first checkpoint that has one. If one is an ONNX
    graph, which computes in fp32, so does the other. Each has its own thresholds.

    Raises:
        UsageError: They are scored on different images.
    """
    found = dict[int, DetectedSplit | None]()
    files = sorted(enumerate((a, b)), key=lambda item: _detections_in(item[1]) is not None)
    with contextlib.ExitStack() as stack:
        if _detections_in(files[0][1]):
            _require_no_network_settings(a, config)
        else:
            device, ranks = stack.enter_context(_joined_ranks(config))
        checkpoints = {}
        for n, file in files:
            if not _detections_in(file):
                from ssdctl.checkpoint.file import read_model
                from ssdctl.checkpoint.format import OnnxGraph
                from ssdctl.distributed.collectives import from_first

                checkpoints[n] = from_first(functools.partial(read_model, file), ranks)
                if isinstance(checkpoints[n], OnnxGraph):  # for both
                    config = config.with_defaults({"evaluate.precision": "fp32"})
        if checkpoints:
            config = _with_data_of([*checkpoints.values()], config)
        for n, file in files:
            if (checkpoint := checkpoints.get(n)) is None:
                found[n] = _read_results(file, config)
                continue
            found[n] = detect_on_split(checkpoint, config, device, progress=progress, ranks=ranks)
    first, second = found[0], found[1]
    if first is None or second is None:
        return None
    ids = [np.unique(f.image_ids) for f in (first, second)]
    if first.about.split != second.about.split or not np.array_equal(ids[0], ids[1]):
        counts = " and ".join(f"{len(f.image_ids):,} of {f.about.split}" for f in (first, second))
        hint = "name one dataset and split for both: --data DIR --split val"
        if first.about.split == second.about.split == "train":
            hint += "; of folds, write the detections of each set (evaluate RUNS --detections "
            hint += "FILE.json), and compare the files: --data DIR --split train"
        raise UsageError(
            f"{a} and {b} are scored on different images ({counts})",
            hint=hint,
        )
    return compare(*(f.score_and_resample(verify=config.evaluate.verify) for f in (first, second)))


@contextlib.contextmanager
def _joined_ranks(config: Config, is_distributed: bool = True) -> Iterator[tuple[Device, Ranks]]:
    from ssdctl.device import opened_device
    from ssdctl.distributed.process_group import failing_together, process_group

    ranks = find_ranks()
    with contextlib.ExitStack() as stack:
        with failing_together(is_distributed):
            device = stack.enter_context(opened_device(config.evaluate.device, ranks))
        ranks = ranks if is_distributed else SINGLE_PROCESS
        yield device, stack.enter_context(process_group(ranks, device))


def _detections_in(source: Source) -> Path | None:
    return source if isinstance(source, Path) and source.suffix == ".json" else None


def _require_no_network_settings(detections: Path, config: Config) -> None:
    """Refuse options of the network, which do not change the detections of a file."""
    reason = f"does not apply to {detections}, a file of detections"
    hint = "leave it out, or evaluate a checkpoint"
    config.require_not_given(NETWORK_SETTINGS, reason, hint)


def _read_unless_deleted(
    source: Source, *, may_be_deleted: bool
) -> NetworkWeights | OnnxGraph | None:
    from ssdctl.checkpoint.file import read_model

    try:
        return read_model(source)
    except SsdctlError:
        if not may_be_deleted or (isinstance(source, Path) and source.exists()):
            raise
        return None


def _score(found: DetectedSplit, config: Config, detections_file: Path | None) -> Evaluation:
    """Score detections, after they are written."""
    if detections_file is not None:
        names = None
        if _numbers_images(Path(found.about.data), Path(found.about.store)):
            truth = found.truth
            names = dict(zip(truth.image_ids.tolist(), truth.file_names, strict=True))
        write_bytes(detections_file, msgspec.json.encode(found.detections.to_coco(names)))
        count = len(found.detections.scores)
        log.info("%d detections written to %s", count, detections_file)
    return found.score(verify=config.evaluate.verify)


def _numbers_images(root: Path, store: Path) -> bool:
    """Return whether a dataset's files have no image ids: the images are numbered by name."""
    made = last_made(store)
    if made is None:
        return not coco.splits_of(root)
    return made.format in {*built_in(FORMATS)} - {"coco"}


def _read_results(path: Path, config: Config) -> DetectedSplit:
    """Read detections to score against the annotations only; no image is read.

    The split of an annotation file is the file, unless the call chooses one.
    """
    settings = config.evaluate
    root, store = dataset_folders(config.data)
    name: str = settings.split
    splits = annotations_of(root, store, without_division(config, root))
    if root.is_file() and len(splits) == 1 and not config.is_chosen("evaluate.split"):
        name = next(iter(splits))
    truth = ground_truth(require_split(splits, name, root))
    image_ids = truth.image_ids
    if settings.annotated_only:
        image_ids = image_ids[np.unique(truth.rows)]
    require_images(image_ids, f"{root}, split {name}")
    warnings = list[str]()
    if is_prepared(root, store):
        duplicates = require_metadata(index_path(store, name)).duplicates
        warnings = duplicate_warnings(name, len(truth.image_ids), duplicates)
    for warning in warnings:
        log.warning("%s", warning)
    found = read_detections(path, truth, has_ids=not _numbers_images(root, store))
    low = settings.score_threshold
    if low is not None:
        found = Detections._make(column[found.scores >= low] for column in found)
    about = EvaluationInfo(
        source=str(path),
        data=str(root.absolute()),
        store=str(store.absolute()),
        split=name,
        score_threshold=low,
        warnings=warnings,
    )
    return DetectedSplit(truth, found, image_ids[: settings.limit], about)


class DetectedSplit(NamedTuple):
    """The detections on a split, ready to be scored."""

    truth: Annotations
    detections: Detections
    image_ids: NDArray[np.int64]  # that are scored
    about: EvaluationInfo

    def score(self, *, verify: bool) -> Evaluation:
        return self.score_and_resample(verify=verify)[0]

    def score_and_resample(self, *, verify: bool) -> tuple[Evaluation, Draws]:
        truth, detections, image_ids, about = self
        return score_and_resample(truth, detections, about, image_ids, verify=verify)


def detect_on_split(
    checkpoint: NetworkWeights | OnnxGraph,
    config: Config,
    device: Device,
    *,
    progress: Progress,
    ranks: Ranks = SINGLE_PROCESS,
    name: str | None = None,
    fold_of: ModelFile | None = None,
    only_fold: bool = False,
) -> DetectedSplit | None:
    """Detect with the network of a checkpoint on a split; None on ranks other than the first.

    Args:
        ranks: Each detects on its share of the images.
        name: Replaces the path in messages.
        fold_of: The checkpoint whose fold is scored; None: this one.
        only_fold: Raise UsageError if the dataset is not the one that the fold is of.
    """
    from ssdctl.distributed.collectives import open_on_all_ranks
    from ssdctl.evaluation.detect import detect
    from ssdctl.inference.detector import DetectorConfig
    from ssdctl.inference.predict import fit_to_graph, open_detector

    config = fit_to_graph(checkpoint, config)
    settings, data = config.evaluate, choose_data(checkpoint, config)
    root, folder = dataset_folders(data)
    splits = open_on_all_ranks(root, folder, without_division(config, root), ranks, progress)
    fold = choose_fold(fold_of or checkpoint, config, root, splits, is_required=only_fold)
    name_of_split = settings.split if fold is None else "train"
    split = require_split(splits, name_of_split, root)
    held = None if fold is None else fold_rows(split, *fold)
    warnings = warn_of_images(fold_of or checkpoint, root, splits, name_of_split, held)
    split = tiled(split, tiling := tiling_of(config, checkpoint.tiling))
    how: dict[str, Any] = {"batch_size": settings.batch_size, "ranks": ranks}
    how["category_ids"] = dataset_category_ids(checkpoint, split.classes, root)
    what = f"{name or checkpoint.path} (step {checkpoint.step}) on "
    what += name_of_images(root, name_of_split, fold, is_default=not data.root)
    truth = read_ground_truth(split.index_file)
    rows = rows_to_score(split, truth, settings, what, held)
    precision = choose_precision(checkpoint, settings, device)
    rules = DetectorConfig(precision, settings.score_threshold, settings.nms_iou)
    detector = open_detector(checkpoint, device, rules)
    ids = {"images": split.image_ids[rows], "categories": how["category_ids"]}
    _require_same({"precision": precision, "tile": tiling}, ids, detector, ranks)
    how["threads"] = settings.workers or usable_cores(ranks.world_size)
    how["progress"] = progress if ranks.is_main else None
    found = detect(detector, split, rows, **how)
    about = EvaluationInfo(
        source=str(checkpoint.path),
        step=checkpoint.step,
        epoch=round(checkpoint.epoch, 4),
        data=str(root.absolute()),
        store=str(folder.absolute()),
        split=name_of_split,
        precision=precision,
        score_threshold=detector.score_threshold,
        warnings=warnings,
    )
    return None if found is None else DetectedSplit(truth, found, split.image_ids[rows], about)


def _require_same(
    facts: dict[str, object],
    ids: Mapping[str, ArrayLike],
    detector: DetectorBackend,
    ranks: Ranks,
) -> None:
    """Raise UsageError on all ranks if they would detect on other images, or in another way."""
    from ssdctl.distributed.collectives import require_same

    if ranks.is_single_process:
        return
    sums = {f"the checksum of the {k}": zlib.crc32(np.array(v).tobytes()) for k, v in ids.items()}
    rules = {"NMS IoU": detector.nms_iou, "the score threshold": detector.score_threshold}
    require_same({**sums, **facts, **rules}, ranks)
