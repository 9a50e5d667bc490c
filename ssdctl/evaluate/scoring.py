"""Score detections in a process beside the one that found them. Torch-free.

    scoring = start_scoring(annotations, detections, image_ids)
    ...
    if scoring.is_done: scores = scoring.result()

The process is `python -m ssdctl.evaluate.scoring`: detections come in on its stdin, scores leave on
its stdout. It takes no signals; whoever started it is asked, and waits for it.
"""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.errors import SsdctlError
from ssdctl.evaluate.coco_ap import ClassScore, Detections, Scores, score


class _Answer(msgspec.Struct):
    figures: dict[str, float]
    per_class: list[tuple[int, str, float, float]]
    images: int


class Job(NamedTuple):
    """What is to be scored."""

    annotations: Path
    detections: Detections
    image_ids: NDArray[np.int64] | None


class Scoring:
    """A score that is being worked out."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._answer: Scores | None = None
        self._thread = threading.Thread(target=self._ask, name="scoring", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether `result` answers at once."""
        return not self._thread.is_alive()

    def result(self) -> Scores:
        """The scores; waits for them.

        Raises:
            DataError: See `score`.
        """
        self._thread.join()
        if self._answer is None:  # the process was killed, or refused: here the reason shows
            job = self._job
            self._answer = score(job.annotations, job.detections, image_ids=job.image_ids)
        return self._answer

    def _ask(self) -> None:
        command = [sys.executable, "-m", "ssdctl.evaluate.scoring", str(self._job.annotations)]
        try:
            done = subprocess.run(command, input=_packed(self._job), capture_output=True)
            answer = msgspec.json.decode(done.stdout, type=_Answer)
        except (OSError, msgspec.DecodeError):
            return
        per_class = [ClassScore(*entry) for entry in answer.per_class]
        self._answer = Scores(answer.figures, per_class, answer.images)


def start_scoring(
    annotations: Path, detections: Detections, image_ids: NDArray[np.int64] | None = None
) -> Scoring:
    """Begin to score detections against an annotation file; see `score`."""
    return Scoring(Job(annotations, detections, image_ids))


def _packed(job: Job) -> bytes:
    buffer = io.BytesIO()
    arrays = {f"d_{name}": column for name, column in job.detections._asdict().items()}
    if job.image_ids is not None:
        arrays["image_ids"] = job.image_ids
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def main() -> None:
    """Answer one job."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as arrays:
        detections = Detections(*(arrays[f"d_{name}"] for name in Detections._fields))
        image_ids = arrays["image_ids"] if "image_ids" in arrays else None
    try:
        scores = score(Path(sys.argv[1]), detections, image_ids=image_ids)
    except SsdctlError:
        sys.exit(1)  # the one who asked finds out why
    answer = _Answer(scores.figures, [tuple(c) for c in scores.per_class], scores.images)
    sys.stdout.buffer.write(msgspec.json.encode(answer))


if __name__ == "__main__":
    main()
