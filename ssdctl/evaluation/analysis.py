"""Score detections, and analyze their errors, curves, calibration and confusions.

    evaluation = score(read_ground_truth(index), detections, EvaluationInfo(source="best.pt", ...))
    write_evaluation(folder / "evaluation.json", evaluation)

The report page is drawn from this file, so a network need not run again for it.
`BackgroundScoring` scores in another process.
"""

from __future__ import annotations

import logging
import pickle
import signal
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ssdctl.data.annotations import Annotations
from ssdctl.data.drawing import one_line
from ssdctl.errors import SsdctlError
from ssdctl.evaluation.coco_ap import (
    IOU_THRESHOLDS,
    Detections,
    Scoring,
    evaluated,
    run_scoring,
)
from ssdctl.evaluation.matches import Matches, match_objects
from ssdctl.evaluation.resample import Draws, differences, images_needed, intervals, resample
from ssdctl.evaluation.suspects import find_suspects
from ssdctl.files import msgspec_type
from ssdctl.runs.evaluation import (
    SAMPLE_SCORE,
    SHOWN_SCORE,
    Box,
    CalibrationBin,
    ClassAnalysis,
    Comparison,
    Confusion,
    ErrorKind,
    Evaluation,
    EvaluationInfo,
    SampleBox,
    SampleImage,
    Suspect,
)
from ssdctl.runtime.signals import STOP_SIGNALS
from ssdctl.runtime.system import run_in_daemon_thread

log = logging.getLogger(__name__)

SCORER = "from ssdctl.evaluation.analysis import serve; serve()"
CURVE_IOUS = (0.5, 0.75, 0.9)
NUM_SAMPLES = 12  # worst images, and the same number of random ones
SEED = 0  # random samples
MAX_SAMPLE_BOXES = 100  # per image
NUM_CONFUSIONS = 12
SHOWN_SUSPECTS = 50
MAX_MATRIX = 100  # classes of a confusion matrix
MAX_COUNTED = 1 << 31  # detections of an image in it
ERRORS = {  # TIDE's kinds (Bolya et al. 2020): name, meaning, what one would have to do
    "Cls": ("Classification", "right place, wrong class", "Fixing wrong classes"),
    "Loc": (
        "Localization",
        "right class, IoU with the object between 0.1 and 0.5",
        "Fitting boxes better",
    ),
    "Both": (
        "Both",
        "wrong class and IoU between 0.1 and 0.5",
        "Fixing wrong classes with inexact boxes",
    ),
    "Dupe": (
        "Duplicate",
        "object already detected with a higher score",
        "Removing duplicate detections",
    ),
    "Bkg": ("Background", "IoU below 0.1 with every object", "Removing detections of background"),
    "Miss": ("Missed", "object with no detection nearby", "Finding missed objects"),
}
ERROR_NAMES = {kind: name for kind, (name, _, _) in ERRORS.items()}
IOU_FOUND, IOU_BACKGROUND = 0.5, 0.1  # TIDE's thresholds
NEGLIGIBLE_GAIN = 0.005  # AP50
BARELY_TRAINED = 0.02  # AP50 below which the types of errors say nothing,
CLEAR_GAIN = 0.5  # AP50, unless one of them explains most of it


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
    return score_and_resample(truth, detections, about, image_ids, verify=verify)[0]


def score_and_resample(
    truth: Annotations,
    detections: Detections,
    about: EvaluationInfo,
    image_ids: NDArray[np.int64] | None = None,
    *,
    verify: bool = False,
) -> tuple[Evaluation, Draws]:
    """Return an evaluation, and the draws of its intervals."""
    scoring = run_scoring(truth, detections, image_ids=image_ids, verify=verify)
    is_scored = np.isin(detections.category_ids, [entry.category_id for entry in scoring.per_class])
    is_scored &= np.isin(detections.image_ids, scoring.image_ids)
    detections = Detections._make(column[is_scored] for column in detections)
    count, threshold = len(detections.scores), about.score_threshold
    if scoring.metrics["AP"] < 0:
        log.warning("the images have no annotated objects: there is no AP (-1)")
    elif not count:
        limit = "" if threshold is None else f" with a score of at least {threshold:g}"
        log.warning("%s: no detection%s: AP is 0", about.source, limit)
    about = msgspec.structs.replace(about, images=len(scoring.image_ids), detections=count)
    matches = match_objects(scoring)
    draws = resample(scoring, matches)
    return analyze(scoring, detections, about, matches, draws), draws


def compare(a: tuple[Evaluation, Draws], b: tuple[Evaluation, Draws]) -> Comparison:
    """Compare two evaluations on the same images."""
    overall, *per_class = differences(a[1], b[1])
    needed = images_needed(overall["AP"], a[0].about.images) if "AP" in overall else None
    return Comparison(a[0], b[0], overall, per_class, needed)


class BackgroundScoring:
    """Compute an evaluation in a background process; takes the arguments of `score`.

    The process reads them from stdin and writes an `Evaluation` to stdout. It ignores signals: the
    parent process handles them.
    """

    def __init__(
        self,
        truth: Annotations,
        detections: Detections,
        about: EvaluationInfo,
        image_ids: NDArray[np.int64] | None = None,
    ) -> None:
        self._job = truth, detections, about, image_ids
        self._evaluation = run_in_daemon_thread(self._run)

    @property
    def is_done(self) -> bool:
        """Whether `result` returns without waiting."""
        return self._evaluation.done()

    def result(self) -> Evaluation:
        # If the process failed, raise the reason here.
        return self._evaluation.result() or score(*self._job)

    def _run(self) -> Evaluation | None:
        command = [sys.executable, "-c", SCORER]
        try:
            done = subprocess.run(command, input=pickle.dumps(self._job), capture_output=True)
            if done.returncode < 0:
                log.warning(
                    "the process that scores was killed (%s), as if memory ran out: scoring in the "
                    "training process",
                    signal.Signals(-done.returncode).name,
                )
            return msgspec.json.decode(done.stdout, type=msgspec_type(Evaluation))
        except (OSError, msgspec.DecodeError):
            return None


def serve() -> None:
    """Score the job of a `BackgroundScoring`."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    job = pickle.load(sys.stdin.buffer)  # from the parent process
    try:
        evaluation = score(*job)
    except SsdctlError:
        sys.exit(1)  # the parent repeats the job and raises the error
    sys.stdout.buffer.write(msgspec.json.encode(evaluation))


def analyze(
    scoring: Scoring,
    detections: Detections,
    about: EvaluationInfo,
    matches: list[list[Matches]],
    draws: Draws,
) -> Evaluation:
    """Compute the evaluation record of scored detections."""
    overall, *by_class = intervals(draws)
    precision = scoring.engine.eval["precision"]
    table, diagnostics = _shown(scoring)
    counted = np.sort(np.array(list(diagnostics["dt_status"]), np.int64)) - 1  # not in a crowd
    shown = _confusion_matrix(_evaluated(scoring, table[counted]))
    counts = shown["matrix"].astype(np.int64)
    bins, calibration_error, suspects = list[CalibrationBin](), None, list[Suspect]()
    if detections.are_probabilities:
        bins, calibration_error = _calibration(scoring.engine)
        suspects = find_suspects(scoring.truth, scoring.image_ids, [detections])[:SHOWN_SUSPECTS]
    else:
        log.warning("there are scores outside of 0 to 1: without calibration and suspects")
    return Evaluation(
        about=about,
        metrics=scoring.metrics,
        per_class=[
            ClassAnalysis(
                *entry[:2],
                int(counts[k].sum()),
                *entry[2:],
                *_best_f1(matches[k][0], are_probabilities=detections.are_probabilities),
                _curve(precision[0, :, [k], 0, 2]),
                _f1_curve(matches[k][0]) if detections.are_probabilities else [],
                by_class[k],
            )
            for k, entry in enumerate(scoring.per_class)
        ],
        curves={
            f"{iou:.2f}": _curve(precision[np.isclose(IOU_THRESHOLDS, iou)][0, :, :, 0, 2].T)
            for iou in CURVE_IOUS
        },
        errors=error_kinds(scoring),
        calibration=bins,
        calibration_error=calibration_error,
        confusions=_confusions(counts[:-1, :-1], shown["cat_names"]),
        samples=choose_samples(scoring, detections),
        sample_score=SAMPLE_SCORE,
        confusion=counts.tolist() if len(counts) <= MAX_MATRIX + 1 else [],  # background last
        intervals=overall,
        suspects=suspects,
    )


def _calibration(engine: Any) -> tuple[list[CalibrationBin], float]:
    found = engine.calibration()
    columns = ("bin_lower", "bin_upper", "count", "avg_confidence", "avg_accuracy")
    return [CalibrationBin(*(b[c] for c in columns)) for b in found["bins"]], found["ece"]


def error_kinds(scoring: Scoring) -> list[ErrorKind]:
    """Return TIDE's errors at IoU 0.5, sorted by their cost in AP50."""
    tide = scoring.engine.tide_errors(pos_thr=IOU_FOUND, bg_thr=IOU_BACKGROUND)
    gains = tide["delta_ap"]
    gains["Miss"] += _gain_of_absent(scoring, tide["ap_base"] + gains["Miss"])
    kinds = [
        ErrorKind(kind, meaning, tide["counts"][kind], gains[kind])
        for kind, (_, meaning, _) in ERRORS.items()
    ]
    return sorted(kinds, key=lambda e: -e.delta_ap)


def _gain_of_absent(scoring: Scoring, ap: float) -> float:
    """Return what the mean AP gains without the classes that are missed altogether.

    The engine counts them as 0, where TIDE has no AP for a class without objects and detections.
    """
    is_detected = np.isin(scoring.engine.params.cat_ids, scoring.table[:, 6])
    if is_detected.all():
        return 0.0
    counts = _confusion_matrix(scoring.engine)["matrix"].astype(np.int64)[:-1]
    num_objects = counts.sum(axis=1)
    has_objects, is_missed = num_objects > 0, counts[:, -1] == num_objects
    num_rest = (has_objects & (is_detected | ~is_missed)).sum()
    return float(ap * has_objects.sum() / num_rest - ap) if num_rest else 0.0


def diagnosis(evaluation: Evaluation) -> str:
    """Return one sentence: which type of error costs most AP50, and for which classes."""
    if not any(entry.objects for entry in evaluation.per_class):
        return "There is nothing to score: the images have no objects."
    if not evaluation.about.detections:
        return "Nothing was detected: train longer, or lower the score threshold."
    worst = max(evaluation.errors, key=lambda e: e.delta_ap, default=None)
    is_clear = worst is not None and worst.delta_ap >= CLEAR_GAIN
    if evaluation.metrics.get("AP50", 0) < BARELY_TRAINED and not is_clear:
        return "Almost no detection is right yet: train longer."
    if worst is None or worst.delta_ap < NEGLIGIBLE_GAIN:
        return f"No type of error costs more than {NEGLIGIBLE_GAIN} AP50."
    remedy = ERRORS[worst.kind][2] if worst.kind in ERRORS else worst.kind
    sentence = f"{remedy} would gain most: +{worst.delta_ap:.3f} AP50"
    if worst.kind == "Cls" and evaluation.confusions:
        pair = evaluation.confusions[0]
        sentence += f" (most often {one_line(pair.truth)} detected as {one_line(pair.found)})"
    return sentence + "."


def _confusion_matrix(engine: Any) -> dict[str, Any]:
    """Return the engine's matrix; by default it takes 100 detections of an image in all."""
    found: dict[str, Any] = engine.confusion_matrix(iou_thr=IOU_FOUND, max_det=MAX_COUNTED)
    return found


def _f1(matches: Matches, limits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return F1 at IoU 0.5 of the detections with a score above each limit."""
    is_right, is_found = np.zeros(len(matches.scores)), np.ones(len(matches.scores))
    is_right[matches.hits[0]], is_found[matches.ignored[0]] = 1, 0
    count = np.searchsorted(-matches.scores, -limits)  # scores are in descending order
    right, found = (np.append(0, part.cumsum())[count] for part in (is_right, is_found))
    f1: NDArray[np.float64] = 2 * right / np.maximum(found + len(matches.objects), 1)
    return f1


def _f1_curve(matches: Matches) -> list[float]:
    if not len(matches.objects):
        return []
    curve: list[float] = _f1(matches, np.linspace(0, 1, 101)).round(4).tolist()
    return curve


def best_threshold(evaluation: Evaluation) -> tuple[float, float] | None:
    """Return the score threshold with the best F1, as the mean of the classes, and that F1."""
    curves = [entry.f1 for entry in evaluation.per_class if entry.f1]
    if not curves:
        return None
    mean = np.mean(curves, axis=0)
    best = np.flatnonzero(mean == mean.max())  # the middle one: it tolerates other images best
    return float(best[len(best) // 2]) / 100, round(float(mean.max()), 4)


def _curve(precision: NDArray[np.float64]) -> list[float]:
    """Return the mean of (K, 101) precisions over the classes that have objects."""
    measured = precision[(precision > -1).all(axis=1)]
    return measured.mean(axis=0).round(4).tolist() if len(measured) else []


def _best_f1(matches: Matches, *, are_probabilities: bool) -> tuple[float, float]:
    if not len(matches.objects):
        return -1.0, -1.0
    # Predictions have a score above the threshold; 0.56 * 1e4 is 5600.000000000001.
    scores = np.append(matches.scores, 0.0)
    if are_probabilities:
        limits = np.maximum((np.ceil(np.round(scores * 1e4, 6)) - 1) / 1e4, 0)
    else:
        limits = np.nextafter(scores, -np.inf)
    f1 = _f1(matches, limits)
    best = int(f1.argmax())  # the highest threshold
    if not f1[best]:
        return 0.0, 0.0
    return round(float(f1[best]), 4), float(limits[best])


def _confusions(counts: NDArray[np.int64], names: list[str]) -> list[Confusion]:
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:NUM_CONFUSIONS]
    pairs = zip(*np.unravel_index(order, wrong.shape), strict=True)
    return [Confusion(names[t], names[f], int(wrong[t, f])) for t, f in pairs if wrong[t, f]]


def choose_samples(scoring: Scoring, detections: Detections) -> list[SampleImage]:
    """Return the images with the worst F1, then random ones among the others; ids are ascending."""
    f1, errors = _image_errors(scoring)
    order = np.lexsort((-errors, f1))[:NUM_SAMPLES]
    worst = order[errors[order] > 0]
    others = np.setdiff1d(np.arange(len(f1)), worst)
    count = min(NUM_SAMPLES, len(others))
    random = np.sort(np.random.default_rng(SEED).choice(others, count, replace=False))
    return [
        _sample(scoring.truth, detections, int(scoring.image_ids[row]), is_worst)
        for is_worst, rows in ((True, worst), (False, random))
        for row in rows
    ]


def _image_errors(scoring: Scoring) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the F1 and the number of errors of N images, at IoU 0.5 and the score shown."""
    numbers, images = scoring.engine.params.img_ids, _shown(scoring)[1]["img_summary"]
    empty = {"tp": 0, "fp": 0, "fn": 0}  # no object, nothing detected: it is not listed
    hits, false, missed = (
        np.array([images.get(n, empty)[kind] for n in numbers], np.int64) for kind in empty
    )
    errors = false + missed
    return np.where(errors > 0, 2 * hits / np.maximum(2 * hits + errors, 1), 1), errors


def _shown(scoring: Scoring) -> tuple[NDArray[np.float64], dict[str, Any]]:
    """Return the detections above SHOWN_SCORE, and the engine's diagnostics of images and boxes."""
    table = scoring.table[scoring.table[:, 5] >= SHOWN_SCORE]
    return table, _evaluated(scoring, table).image_diagnostics(iou_thr=IOU_FOUND)


def _evaluated(scoring: Scoring, table: NDArray[np.float64]) -> Any:
    return evaluated(scoring.engine.coco_gt, table, scoring.engine.params.img_ids)


def _sample(
    truth: Annotations, detections: Detections, image_id: int, is_worst: bool
) -> SampleImage:
    is_shown = (detections.image_ids == image_id) & (detections.scores >= SAMPLE_SCORE)
    shown = np.flatnonzero(is_shown)
    shown = shown[np.argsort(-detections.scores[shown].round(4), kind="stable")][:MAX_SAMPLE_BOXES]
    found = [
        SampleBox(int(detections.category_ids[n]), _box(detections.boxes[n]), round(float(s), 4))
        for n, s in zip(shown, detections.scores[shown], strict=True)
    ]
    row = int(np.flatnonzero(truth.image_ids == image_id)[0])
    category_ids = truth.object_category_ids
    objects = [
        SampleBox(int(category_ids[n]), _box(truth.boxes[n]), is_crowd=bool(truth.is_crowd[n]))
        for n in np.flatnonzero(truth.rows == row)
    ]
    content = "" if truth.contents is None else f"{truth.contents[row]:012x}"
    return SampleImage(image_id, truth.file_names[row], objects, found, is_worst, content)


def _box(values: NDArray[np.float64]) -> Box:
    left, top, width, height = (round(float(v), 2) for v in values)
    return left, top, width, height
