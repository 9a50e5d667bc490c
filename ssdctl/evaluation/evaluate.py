"""Score what a user names: a checkpoint, a run's checkpoints, or a file of detections. Torch-free.

for evaluation in evaluate_files([find_checkpoint("runs/a")], resolved, progress=progress_bar):
    evaluation.figures["AP"]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from ssdctl.config import Resolved
from ssdctl.data.dataset import require_split
from ssdctl.data.formats._coco_json import Int64, column, decode, read_content
from ssdctl.data.open_dataset import annotations_of
from ssdctl.data.store_folder import dataset_folders
from ssdctl.distributed.ranks import find_ranks
from ssdctl.errors import DataError, UsageError
from ssdctl.evaluation.coco_ap import Detections, ground_truth
from ssdctl.evaluation.score import score
from ssdctl.files import DECODE_ERRORS
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo
from ssdctl.runtime.progress import Progress


def evaluate_files(
    files: Sequence[Path],
    resolved: Resolved,
    *,
    progress: Progress,
    detections_file: Path | None = None,
) -> Iterator[Evaluation]:
    """Score checkpoints on all ranks, or one file of detections; every rank yields the results.

    The detections of one checkpoint are written to `detections_file` in COCO's results format.

    Raises:
        UsageError: `detections_file`, and not one checkpoint; or see `evaluate_checkpoint`.
        DataError, IntegrityError, NonFiniteError: See `evaluate_checkpoint`.
    """
    is_results = files[0].suffix == ".json"
    if detections_file is not None:
        _check_target(detections_file, files, is_results=is_results)
    if is_results:
        yield _evaluate_results(files[0], resolved)
        return
    from ssdctl.device import open_device
    from ssdctl.distributed.collectives import broadcast
    from ssdctl.distributed.process_group import process_group
    from ssdctl.evaluation.checkpoint import evaluate_checkpoint

    ranks = find_ranks()
    device = open_device(resolved.config.evaluate.device, ranks.local_rank)
    with process_group(ranks, device):
        for file in files:
            evaluation = evaluate_checkpoint(
                file,
                resolved.config,
                device,
                given=resolved.explicit_settings(),
                progress=progress,
                ranks=ranks,
                detections_file=detections_file,
            )
            evaluation = broadcast(evaluation, ranks)
            assert evaluation is not None
            yield evaluation


def _check_target(target: Path, files: Sequence[Path], *, is_results: bool) -> None:
    problem, hint = "", ""
    if is_results:
        problem = f": {files[0]} is a file of detections already"
        hint = "pass a checkpoint instead"
    elif len(files) > 1:
        problem = f" writes one file, but there are {len(files)} checkpoints"
        hint = f"give one of them, such as {files[0]}"
    elif target.is_dir():
        problem, hint = f" {target}: is a folder", "give the name of a file in it"
    if problem:
        raise UsageError(f"--detections{problem}", hint=hint)


def _evaluate_results(path: Path, resolved: Resolved) -> Evaluation:
    """Score detections against the annotations only; no image is read.

    The split of an annotation file is the file, unless the call chooses one.
    """
    settings = resolved.config.evaluate
    root, store = dataset_folders(resolved.config.data)
    name: str = settings.split
    splits = annotations_of(root, store)
    if root.is_file() and len(splits) == 1 and not resolved.is_chosen("evaluate.split"):
        name = next(iter(splits))
    truth = ground_truth(require_split(splits, name, root))
    image_ids = truth.image_ids
    if settings.annotated_only:
        image_ids = image_ids[np.unique(truth.rows)]
    about = EvaluationInfo(source=str(path), data=str(root), store=str(store), split=name)
    found, image_ids = read_detections(path), image_ids[: settings.limit]
    return score(truth, found, about, image_ids, verify=settings.verify)


class _Result(msgspec.Struct, gc=False):
    image_id: Int64
    category_id: Int64
    bbox: tuple[float, float, float, float]
    score: float


def read_detections(path: Path) -> Detections:
    """Read detections from a file in COCO's results format. Ids may be 139 or 139.0.

    Raises:
        DataError: It is not such a file; the message gives the place.
    """
    problem, content = "", read_content(path)
    try:
        rows = decode(content, list[_Result])
        boxes = np.array([r.bbox for r in rows], np.float64).reshape(-1, 4)
        scores = np.array([r.score for r in rows], np.float64)
        if not (np.isfinite(boxes).all() and np.isfinite(scores).all()):
            problem = "numbers that are not finite"
    except DECODE_ERRORS as error:
        problem = str(error).replace("`", "")
    if problem:
        hint = 'expected [{"image_id", "category_id", "bbox", "score"}, ...]'
        raise DataError(f"{path}: not in COCO's results format: {problem}", hint=hint)
    image_ids, category_ids = column(rows, "image_id"), column(rows, "category_id")
    return Detections(image_ids, boxes, scores, category_ids)
