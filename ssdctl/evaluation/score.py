"""Score detections on a split: `score` here, `BackgroundScoring` in another process. Torch-free.

    evaluation = score(read_ground_truth(index), detections, EvaluationInfo(source="best.pt", ...))

The process is `python -m ssdctl.evaluation.score ANNOTATIONS`: it reads detections from stdin and
writes an `Evaluation` to stdout. It ignores signals: the parent process handles them.
"""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.errors import SsdctlError
from ssdctl.evaluation.coco_ap import Detections, read_ground_truth, run_scoring
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo
from ssdctl.runtime.signals import STOP_SIGNALS
from ssdctl.runtime.threads import run_in_daemon_thread

if TYPE_CHECKING:
    from ssdctl.data.annotations import Annotations

log = logging.getLogger(__name__)


def score(
    truth: Annotations,
    detections: Detections,
    about: EvaluationInfo,
    image_ids: NDArray[np.int64] | None = None,
    *,
    verify: bool = False,
) -> Evaluation:
    """Score detections and analyze the errors; see `run_scoring`.

    The numbers of images and detections of `about` are filled in.
    """
    from ssdctl.evaluation.analysis import analyze  # late: training leaves it to the process

    scoring = run_scoring(truth, detections, image_ids=image_ids, verify=verify)
    count, threshold = len(detections.scores), about.score_threshold
    if scoring.figures["AP"] < 0:
        log.warning("the images have no annotated objects: there is no AP (-1)")
    elif not count:
        above = "" if threshold is None else f" with a score above {threshold:g}"
        log.warning("%s: no detection%s: AP is 0", about.source, above)
    about = msgspec.structs.replace(about, images=len(scoring.image_ids), detections=count)
    return analyze(scoring, detections, about)


class BackgroundScoring:
    """An evaluation that a background process computes; the arguments are those of `score`."""

    def __init__(
        self,
        annotations: Path,
        detections: Detections,
        about: EvaluationInfo,
        image_ids: NDArray[np.int64] | None = None,
    ) -> None:
        self._annotations = annotations
        self._job = detections, about, image_ids
        self._evaluation = run_in_daemon_thread(self._run)

    @property
    def is_done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._evaluation.done()

    def result(self) -> Evaluation:
        # If the process failed, raise the reason here.
        return self._evaluation.result() or score(read_ground_truth(self._annotations), *self._job)

    def _run(self) -> Evaluation | None:
        command = [sys.executable, "-m", "ssdctl.evaluation.score", str(self._annotations)]
        try:
            done = subprocess.run(command, input=pickle.dumps(self._job), capture_output=True)
            if done.returncode < 0:
                log.warning(
                    "the process that scores was killed (%s), as if memory ran out: scoring in the "
                    "training process",
                    signal.Signals(-done.returncode).name,
                )
            return msgspec.json.decode(done.stdout, type=Evaluation)
        except (OSError, msgspec.DecodeError):
            return None


def main() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    job = pickle.load(sys.stdin.buffer)  # of the parent process
    try:
        evaluation = score(read_ground_truth(Path(sys.argv[1])), *job)
    except SsdctlError:
        sys.exit(1)  # the parent repeats the job and raises the error
    sys.stdout.buffer.write(msgspec.json.encode(evaluation))


if __name__ == "__main__":
    main()
