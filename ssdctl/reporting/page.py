"""Write the report: one self-contained HTML page of one run folder or several."""

from __future__ import annotations

import base64
import hashlib
import io
import itertools
import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup, escape
from PIL import Image

from ssdctl._version import __version__
from ssdctl.config.render import toml_value
from ssdctl.data.dataset import require_split
from ssdctl.data.drawing import class_color, ink_on, one_line
from ssdctl.data.image_decode import Pixels, decode
from ssdctl.data.index import content_of, image_contents
from ssdctl.data.open_dataset import annotations_with_images
from ssdctl.data.sources import is_prepared
from ssdctl.data.store import ImageFiles, open_split
from ssdctl.data.stored_images import read_report
from ssdctl.errors import DataError, SsdctlError
from ssdctl.evaluation.analysis import ERROR_NAMES, best_threshold, diagnosis
from ssdctl.evaluation.coco_ap import COCO_METRICS
from ssdctl.files import remove_stale_temporaries, require_own_file, safe_join, write_text
from ssdctl.reporting import charts
from ssdctl.reporting.charts import Chart
from ssdctl.runs.evaluation import (
    SHOWN_SCORE,
    Box,
    Evaluation,
    Interval,
    SampleImage,
    interval_text,
    write_evaluation,
)
from ssdctl.runs.folder import PAGE, RunDir, data_name, make_report_dir
from ssdctl.runs.run import Run, different_settings, folds_text
from ssdctl.runtime.progress import duration
from ssdctl.runtime.safe_text import open_template
from ssdctl.runtime.system import home_folders

HERE = Path(__file__).parent
MAX_IMAGES, MIN_IMAGES = 24, 4  # all runs, each run: the page stays small
SHOWN_CLASSES = 6  # named in the header
MAX_SIDE = 480  # pixels of an embedded image
JPEG_QUALITY = 78
Reader = Callable[[SampleImage], tuple[Pixels, int]]
STEMS = {"resnet": "ResNet", "vgg": "VGG"}
EVENT_KEYS = ("kind", "step", "epoch", "event")
SIZES = {"APs": "small", "APm": "medium", "APl": "large"}


def write_report(runs: Sequence[Run], target: Path) -> None:
    """Write the page. UsageError if `target` is not a run's own, and another file."""
    if all(target != RunDir(run.path).report for run in runs):
        require_own_file(target, "--out", PAGE)
    remove_stale_temporaries(target.parent, target.name)
    limit, folder = max(MAX_IMAGES // len(runs), MIN_IMAGES), target.absolute().parent
    analyses = [_analysis(run, limit, folder) for run in runs]
    curves = charts.training_charts(runs)
    if len(runs) > 1 and (compared := charts.runs_precision_recall(runs)):
        curves.append(compared)
    drawn = [*itertools.chain(*(analysis["charts"] for analysis in analyses)), *curves]
    script = (HERE / "report.js").read_text(encoding="utf-8")
    filters = {"score": _score, "interval": _interval, "one_line": one_line, "px": "{:.1f}".format}
    names = [run.name for run in runs]
    if len(runs) == 1:  # a folder's name alone may be as plain as "run"
        names = ["/".join(Path(_without_home(str(runs[0].path.resolve()))).parts[-2:])]
    page = open_template(HERE / "page.html", filters, autoescape=True).render(
        runs=runs,
        heading=" \u00b7 ".join(names),
        facts=[_facts(run) for run in runs],
        folds=folds_text(runs),
        curves=curves,
        frame=charts,
        style=Markup((HERE / "report.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        metrics=list(COCO_METRICS),
        bests={name: _best(runs, name) for name in COCO_METRICS},
        class_names=sorted({name for run in runs for name in run.class_ap}),
        differences=different_settings(list(runs)),
        analyses=analyses,
        data=_as_script(analyses, drawn),
        error_names=ERROR_NAMES,
        shown_score=SHOWN_SCORE,
        sizes=SIZES,
        version=__version__,
    )
    page = _with_relative_paths(page, folder)
    # File names that are not UTF-8 contain surrogates, which a page cannot.
    write_text(target, page.encode("utf-8", "backslashreplace").decode())


def _with_relative_paths(text: str, folder: Path) -> str:
    """Make absolute paths near a folder relative to it: a shared page names no home folder."""
    shared = {above for home in home_folders() for above in home.parents}
    for ups, above in enumerate((folder, *folder.parents)):
        if len(above.parts) > 2 and above not in shared:  # not /home, not /tmp
            relative = "/".join([".."] * ups) or "."
            text = _with_path_as(relative, above, text)
    return _without_home(text)


def _without_home(text: str) -> str:
    for home in home_folders():
        text = _with_path_as("~", home, text)
    return text


def _with_path_as(short: str, path: Path, text: str) -> str:
    for written in {str(path), str(escape(str(path)))}:
        text = re.sub(rf"(?<![\w./-]){re.escape(written)}(?![\w.-])", short, text)
    return text


def write_evaluation_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write an evaluation and its report to a folder, and return the page's path."""
    run = make_report_dir(folder)
    write_evaluation(run.evaluation, evaluation)
    write_report([Run(folder)], run.report)
    return run.report


def _facts(run: Run) -> dict[str, str]:
    """Return what the header says about a run, by its label; what is unknown is left out."""
    started, about = run.started, run.evaluation.about if run.evaluation else None
    facts = {}
    if started is not None:
        facts["Date"] = f"{started.time:%Y-%m-%d %H:%M}"
    if backbone := run.settings.get("model.backbone"):
        if match := re.fullmatch(r"([a-z]+)(\d+)", str(backbone)):
            backbone = f"{STEMS.get(match[1], match[1])}-{match[2]}"
        facts["Network"] = f"SSD300, {backbone}"
    elif about is not None:
        source = about.source if ", " in about.source else Path(about.source).name  # folds
        facts["Evaluated"] = one_line(source, len(source))
    if names := list(run.class_ap):
        shown = ", ".join(one_line(name) for name in names[:SHOWN_CLASSES])
        facts["Classes"] = f"{len(names)}: {shown}{', ...' if len(names) > SHOWN_CLASSES else ''}"
    name = data_name(run.settings) or (Path(about.data).name or about.data if about else "")
    data = [name] if name else []
    counts = {} if about is None else {about.split: about.images}
    if started is not None:
        counts = {"train": started.train_images, "val": started.val_images}
    if run.settings.get("train.overfit"):  # the name has their number
        counts = {}
    data += [f"{count:,} {name}" for name, count in counts.items() if count]
    if data:
        facts["Data"] = ", ".join(data)
    if run.environment is not None:
        device, count = run.environment.device, run.environment.world_size
        precision = run.settings.get("train.precision")
        facts["Device"] = f"{count} x {device}" if count > 1 else device
        facts["Device"] += f", {precision}" if precision else ""
    length = []
    if run.train:
        last = run.train[-1]
        length.append(f"{last['step']:,} steps, {last['epoch']:.1f} epochs")
    if run.duration_s is not None:
        length.append(duration(run.duration_s))
    if length:
        facts["Length"] = ", ".join(length)
    return facts


def _command(run: Run, page_folder: Path) -> str | None:
    """Return the command that trained a run, to be copied into a shell in the page's folder.

    There is none for several ranks, whose launcher is not known, and for `python -c` or a notebook.
    """
    if run.environment is None or run.environment.world_size > 1:
        return None
    program, *words = run.environment.command
    if words[:1] == ["-c"] or any("kernel_launcher" in word for word in words[:2]):
        return None
    folder = Path(run.environment.folder or page_folder)
    words = [Path(program).name, *words]
    command = " ".join(_quoted(_with_relative_paths(word, folder)) for word in words)
    relative = _with_relative_paths(str(folder), page_folder)
    return command if relative == "." else f"cd {_quoted(relative)} && {command}"


def _quoted(word: str) -> str:
    """Quote a word for a shell, but for a tilde at its start."""
    return "~/" + shlex.quote(word[2:]) if word.startswith("~/") else shlex.quote(word)


def _analysis(run: Run, limit: int, page_folder: Path) -> dict[str, Any]:
    evaluation = run.evaluation
    images, reason = embed_samples(evaluation, limit)
    kinds = (charts.precision_recall, charts.f1_over_score, charts.calibration)
    drawn = [draw(evaluation) for draw in kinds] if evaluation else []
    errors = evaluation.errors if evaluation else []
    classes, is_other = evaluation.per_class if evaluation else [], _is_other(run)
    measured = sorted((c for c in classes if c.AP >= 0), key=lambda c: -c.AP)
    return {
        "name": run.name,
        "command": _command(run, page_folder),
        "chosen_settings": _chosen_settings(run),
        "all_settings": RunDir(run.path).config.read_text("utf-8") if run.is_trained else "",
        "events": _shown_events(run),
        "evaluation": evaluation,
        "is_other": is_other,
        "intervals": evaluation.intervals if evaluation and not is_other else {},
        "class_intervals": {} if is_other else {c.name: c.intervals for c in classes},
        "diagnosis": diagnosis(evaluation) if evaluation else None,
        "threshold": best_threshold(evaluation) if evaluation else None,
        "ends": (measured[0], measured[-1]) if len(measured) > 1 else None,
        "sizes": [size for size in SIZES if any(getattr(c, size) >= 0 for c in classes)],
        "images": images,
        "reason": reason,
        "charts": [chart for chart in drawn if chart],
        "largest_error": max((e.delta_ap for e in errors), default=0),
        "findings": _findings(Path(evaluation.about.store)) if evaluation else [],
    }


def _findings(store: Path) -> list[tuple[str, str, int]]:
    """Return what `prepare` dropped or repaired: split, kind, count. Empty if it is unknown."""
    splits = outcome.splits if (outcome := read_report(store)) else []
    return [(s.split, kind, count) for s in splits for kind, count in s.counts().items()]


def _shown_events(run: Run) -> list[tuple[int, str, str]]:
    """Return the events as step, name and facts in readable form."""
    shown = []
    for event in run.events:
        if event["event"] != "class_ap":
            facts = (
                f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in event.items()
                if name not in EVENT_KEYS and value is not None
            )
            shown.append((event["step"], event["event"], ", ".join(facts)))
    return shown


def _chosen_settings(run: Run) -> list[tuple[str, str, str]]:
    """Return the settings that neither a preset nor a default gave: name, value, source."""
    if run.environment is None:
        return []
    sources, values = run.environment.sources, run.settings
    return [(path, toml_value(values[path]), sources[path]) for path in values if path in sources]


def _is_other(run: Run) -> bool:
    """Return whether the evaluation in the folder is not the best one of training."""
    evaluation, best = run.evaluation, run.best_metrics
    if evaluation is None or best is None or not run.evals:
        return False
    other = {"step": evaluation.about.step, **evaluation.metrics}
    return any(_score(best.get(k)) != _score(other.get(k)) for k in ("step", "AP", "AP50"))


def _as_script(analyses: Sequence[dict[str, Any]], drawn: Sequence[Chart]) -> Markup:
    """Return what the page's script reads, as JSON that cannot end its script element."""
    data = []
    for analysis in analyses:
        evaluation: Evaluation | None = analysis["evaluation"]
        classes = [one_line(c.name) for c in evaluation.per_class] if evaluation else []
        colors = [class_color(number + 1) for number in range(len(classes))]
        data.append(
            {
                "classes": classes,
                "colors": colors,
                "inks": [ink_on(color) for color in colors],
                "confusion": evaluation.confusion if evaluation else [],
                "images": [image["boxes"] for image in analysis["images"]],
            }
        )
    content = {"runs": data, "charts": [chart.as_json() for chart in drawn]}
    text = json.dumps(content, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _score(value: float | None) -> str:
    return "\u2013" if value is None or value < 0 else f"{value:.3f}"


def _interval(intervals: Mapping[str, Interval], name: str) -> Markup:
    text = interval_text(intervals, name)
    return Markup('<span class="interval">{}</span>').format(text) if text else Markup()


def _best(runs: Sequence[Run], name: str) -> float | None:
    """Return the best value of a metric if several runs have one."""
    values = [run.best_metrics.get(name, -1) for run in runs if run.best_metrics]
    return max(values) if len(values) > 1 else None


def embed_samples(evaluation: Evaluation | None, limit: int) -> tuple[list[dict[str, Any]], str]:
    """Return at most `limit` samples of an evaluation, or the reason why there are none.

    Half of the limit is for the worst images, half for random ones.
    """
    if evaluation is None:
        return (
            [],
            "the run was not evaluated yet; ssdctl evaluate CKPT --report DIR writes such a page",
        )
    try:
        read = _reader(evaluation)
    except (SsdctlError, OSError) as error:
        return [], str(error)
    images, problem = [], "no image was scored"
    worst = [s for s in evaluation.samples if s.is_worst]
    others = [s for s in evaluation.samples if not s.is_worst]
    num_worst = min(len(worst), max(limit - len(others), limit // 2))
    for sample in worst[:num_worst] + others[: limit - num_worst]:
        try:
            images.append(_embed(evaluation, sample, read))
        except (SsdctlError, OSError, SyntaxError, ValueError) as error:
            problem = f"image {sample.image_id} cannot be shown: {error}"
    return images, problem


def _reader(evaluation: Evaluation) -> Reader:
    """Return a function that returns the pixels of an image and its width in the annotations.

    The image is the store's if there is one, else its file.
    """
    about = evaluation.about
    root, store = Path(about.data), Path(about.store)
    annotations = require_split(annotations_with_images(root, store), about.split, root)
    split = open_split(root, store, about.split) if is_prepared(root, store) else None
    packed = None
    if split is not None and not isinstance(split.images, ImageFiles):
        packed = image_contents(split.index_file)
    rows = {name: row for row, name in enumerate(annotations.file_names)}  # ids may be renumbered

    def read(sample: SampleImage) -> tuple[Pixels, int]:
        row = rows.get(sample.file_name)
        if row is None:
            raise DataError("it is no longer in the dataset")
        if split is not None and isinstance(split.images, ImageFiles):
            file = split.images.path(row)
        elif split is None:
            file = safe_join(annotations.folder, annotations.file_names[row])
        now = content_of(file) if packed is None else int(packed[row])
        if sample.content and f"{now:012x}" != sample.content:
            raise DataError("its file was replaced since it was scored")
        if split is not None:
            return split.decode(row), int(split.sizes[row][0])
        width, height = annotations.sizes[row].tolist()
        pixels = decode(file.read_bytes(), (width, height), upright=annotations.upright)
        return pixels, width or pixels.shape[1]

    return read


def _embed(evaluation: Evaluation, sample: SampleImage, read: Reader) -> dict[str, Any]:
    """Return the image of a sample, and its boxes: class number, left, top, right, bottom in pixels
    of the embedded image; of an object also 1 if it is a crowd, of a detection its score."""
    pixels, original_width = read(sample)
    image = Image.fromarray(pixels)
    image.thumbnail((MAX_SIDE, MAX_SIDE), Image.Resampling.LANCZOS)
    scale = image.width / original_width  # a store may have smaller images than the boxes
    numbers = {c.category_id: number for number, c in enumerate(evaluation.per_class)}

    def scaled(category_id: int, box: Box) -> list[float]:
        return [numbers.get(category_id, -1), *_corners(box, scale, image)]

    boxes = {
        "truth": [[*scaled(t.category_id, t.box), int(t.is_crowd)] for t in sample.truth],
        "detections": [[*scaled(d.category_id, d.box), d.score or 0] for d in sample.found],
        "worst": sample.is_worst,
    }
    size = {"width": image.width, "height": image.height}
    return {"name": sample.file_name, "url": _url(image), **size, "boxes": boxes}


def _corners(box: Box, scale: float, image: Image.Image) -> list[float]:
    left, top, width, height = (v * scale for v in box)
    corners = (left, top, left + width, top + height)
    ends = image.size * 2
    return [round(min(max(v, 0), end), 1) for v, end in zip(corners, ends, strict=True)]


def _url(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=JPEG_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()
