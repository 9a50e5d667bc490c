"""Score detections in a background process. Torch-free.

    scoring = BackgroundScoring(annotations, detections, about)
    ...
    if scoring.is_done: evaluation = scoring.result()

The process is `python -m ssdctl.evaluation.scoring ANNOTATIONS`: it reads detections from stdin and
writes an `Evaluation` to stdout. It ignores signals: the parent process handles them.
"""

from __future__ import annotations

import io
import logging
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.errors import SsdctlError
from ssdctl.evaluation.analysis import analyse
from ssdctl.evaluation.coco_ap import Detections, run_scoring
from ssdctl.evaluation.ground_truth import read_ground_truth
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo
from ssdctl.runtime.background import run_in_daemon_thread
from ssdctl.runtime.signals import STOP_SIGNALS

log = logging.getLogger(__name__)


class BackgroundScoring:
    """An evaluation that a background process computes.

    Args:
        annotations: The index of a store, or annotations in COCO's format.
        detections: The detections on their images.
        about: What was evaluated.
        image_ids: Score only these images; None scores all.
    """

    def __init__(
        self,
        annotations: Path,
        detections: Detections,
        about: EvaluationInfo,
        image_ids: NDArray[np.int64] | None = None,
    ) -> None:
        self._job = annotations, detections, about, image_ids
        self._evaluation = run_in_daemon_thread(self._run)

    @property
    def is_done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._evaluation.done()

    def result(self) -> Evaluation:
        """Wait for the evaluation and return it.

        Raises:
            DataError: See `run_scoring`.
        """
        # If the process failed, raise the reason here.
        return self._evaluation.result() or evaluate(*self._job)

    def _run(self) -> Evaluation | None:
        annotations, detections, about, image_ids = self._job
        command = [sys.executable, "-m", "ssdctl.evaluation.scoring", str(annotations)]
        try:
            done = subprocess.run(
                command, input=_packed(detections, about, image_ids), capture_output=True
            )
            if done.returncode < 0:
                log.warning(
                    "the process that scores was killed (%s), as if memory ran out: scoring in the "
                    "training process",
                    signal.Signals(-done.returncode).name,
                )
            return msgspec.json.decode(done.stdout, type=Evaluation)
        except (OSError, msgspec.DecodeError):
            return None


def evaluate(
    annotations: Path,
    detections: Detections,
    about: EvaluationInfo,
    image_ids: NDArray[np.int64] | None,
) -> Evaluation:
    """Score detections and analyse the errors, in this process."""
    truth = read_ground_truth(annotations)
    return analyse(run_scoring(truth, detections, image_ids=image_ids), detections, about)


def _packed(
    detections: Detections, about: EvaluationInfo, image_ids: NDArray[np.int64] | None
) -> bytes:
    buffer = io.BytesIO()
    arrays = {f"d_{name}": column for name, column in detections._asdict().items()}
    if image_ids is not None:
        arrays["image_ids"] = image_ids
    arrays["about"] = np.frombuffer(msgspec.json.encode(about), np.uint8)
    np.savez(buffer, allow_pickle=False, **arrays)
    return buffer.getvalue()


def main() -> None:
    """Run one job."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    with np.load(io.BytesIO(sys.stdin.buffer.read()), allow_pickle=False) as arrays:
        detections = Detections(*(arrays[f"d_{name}"] for name in Detections._fields))
        about = msgspec.json.decode(arrays["about"].tobytes(), type=EvaluationInfo)
        image_ids = arrays.get("image_ids")
    try:
        evaluation = evaluate(Path(sys.argv[1]), detections, about, image_ids)
    except SsdctlError:
        sys.exit(1)  # the parent repeats the job and raises the error
    sys.stdout.buffer.write(msgspec.json.encode(evaluation))


if __name__ == "__main__":
    main()
