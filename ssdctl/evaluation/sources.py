"""Score what a user names: a checkpoint, a run's checkpoints, or a file of detections. Torch-free.

for evaluation in evaluate_files(find_files("runs/first"), resolved, progress=progress_bar):
    evaluation.figures["AP"]
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from ssdctl.config import Resolved
from ssdctl.distributed.ranks import find_ranks
from ssdctl.errors import UsageError
from ssdctl.evaluation.results_file import evaluate_results
from ssdctl.inference.model_source import is_model_folder, locate_checkpoint
from ssdctl.runs.evaluation import Evaluation
from ssdctl.runs.layout import RunDir, find_checkpoint
from ssdctl.runtime.progress import Progress


def locate_source(what: str | os.PathLike[str], *, mirror: str | None = None) -> Path:
    """Return the file or run folder that a user names; a detector is fetched if necessary.

    Raises:
        UsageError, NetworkError, IntegrityError: See `locate_checkpoint`.
    """
    path = Path(what)
    if not path.exists() or is_model_folder(path):
        return locate_checkpoint(what, mirror=mirror)
    return path


def files_to_score(path: Path, *, every: bool = False) -> list[Path]:
    """Return the file itself, or of a run folder the best checkpoint or every one.

    Raises:
        UsageError: A folder without checkpoints.
    """
    return RunDir(path).all_checkpoints() if every else [find_checkpoint(path)]


def evaluate_files(
    files: Sequence[Path],
    resolved: Resolved,
    *,
    progress: Progress,
    detections_file: Path | None = None,
) -> Iterator[Evaluation]:
    """Score checkpoints on all ranks, or a file of detections; every rank yields the results.

    Args:
        files: Checkpoints, or one JSON file in COCO's results format, scored without torch.
        resolved: The call's config.
        progress: Shows the progress of the detection.
        detections_file: Where to write the detections of one checkpoint in COCO's results format.

    Raises:
        UsageError: `detections_file`, and not one checkpoint; or see `evaluate_checkpoint`.
        DataError, IntegrityError, NonFiniteError: See `evaluate_checkpoint`, `evaluate_results`.
    """
    ranks = find_ranks()
    if files[0].suffix == ".json":
        if detections_file is not None:
            raise UsageError(
                f"--detections: {files[0]} is a file of detections already",
                hint="name a checkpoint, of which the detections are to be written",
            )
        yield evaluate_results(files[0], resolved.config)
        return
    if len(files) > 1 and detections_file is not None:
        raise UsageError(
            f"--detections writes one file, but there are {len(files)} checkpoints",
            hint=f"give one of them, such as {files[0]}",
        )
    if detections_file is not None and detections_file.is_dir():
        raise UsageError(
            f"--detections {detections_file}: is a folder", hint="give the name of a file in it"
        )
    from ssdctl.device import open_device
    from ssdctl.distributed.collectives import broadcast
    from ssdctl.distributed.process_group import process_group
    from ssdctl.evaluation.checkpoint import evaluate_checkpoint

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
