"""`ssdctl evaluate`, `runs` and `report`, and the run that commands use by default."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ssdctl.cli.command import Call, command
from ssdctl.cli.console import Console, rich_console, table
from ssdctl.config.render import values
from ssdctl.config.settings import Kind, select
from ssdctl.distributed import find_ranks
from ssdctl.errors import SsdctlError, UsageError, WorseError
from ssdctl.files import require_own_file
from ssdctl.runs.folder import RUNS, RunDir, data_name, make_report_dir, running_on
from ssdctl.runtime.safe_text import counted, quoted
from ssdctl.runtime.system import tune_process

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from ssdctl.evaluation.evaluate import DetectedSplit
    from ssdctl.runs.evaluation import ClassAnalysis, Comparison, Evaluation

MIN_WIDTH = 8  # of a name in a narrow terminal
SIZES = ("APs", "APm", "APl")
INTERVALS = "In brackets: 95% intervals, from 1,000 draws of the images."
RECALLS = ("AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


@command("runs", panel="Results", examples=["ssdctl runs", "ssdctl runs experiments --json"])
def runs(
    call: Call, folder: Annotated[str, Argument(metavar="DIR", help="Folder of runs")] = str(RUNS)
) -> None:
    """List runs, the newest first: date, data, network, steps and best AP.

    Runs in progress and runs with broken files are listed, too.
    """
    from ssdctl.runs.run import Run, folds_text, newest_runs

    if not Path(folder).is_dir():
        raise UsageError(
            f"{folder}: no such folder", hint="`ssdctl train` makes runs/, `--out` another folder"
        )
    rows = [_row(path) for path in newest_runs(Path(folder))]
    lines = folds_text([Run(row["path"]) for row in rows if row.get("fold")])
    call.console.result(rows, (lambda: _table(rows, lines)) if rows else f"{folder}: no runs")
    if rows:
        intact = [row["path"] for row in rows if not row["state"].startswith("broken")]
        call.console.closing([], [f"ssdctl report {quoted(path)}" for path in intact[:1]])


def _row(path: Path) -> dict[str, Any]:
    """Return a line of the list; `state` is `running on HOST`, or what is wrong with the run."""
    from ssdctl.runs.run import Run, written_at

    run, time = Run(path), written_at(path)
    row = {"path": str(path), "time": time, "data": "", "network": "", "steps": 0, "ap": None}
    row["fold"] = None
    host = running_on(path)
    try:
        row |= {
            "data": data_name(run.settings),
            "network": run.settings.get("model.backbone", ""),
            "steps": run.num_steps,
            "ap": (run.best_metrics or {}).get("AP"),
            "fold": run.settings.get("train.fold"),
            "state": f"running on {host}" if host else "",
        }
    except SsdctlError as error:
        row["state"] = f"broken: {error.for_command_line()[0]}"
    date = datetime.datetime.fromtimestamp(time).isoformat(" ", "minutes")
    return {**row, "date": date}


def name_newest_run(console: Console, *, has_checkpoint: bool = True) -> str:
    """Return the newest run of `runs/`, and name it in a line."""
    from ssdctl.runs.run import newest_run

    path = newest_run(has_checkpoint=has_checkpoint)
    console.info(f"using the newest run: {path}")
    return str(path)


@command(
    "report",
    panel="Results",
    examples=["ssdctl report runs/coco-resnet34", "ssdctl report runs/a runs/b --out both.html"],
)
def report(
    call: Call,
    runs: Annotated[
        list[str] | None, Argument(metavar="RUN...", help="Run folders [default: the newest run]")
    ] = None,
    out: Annotated[
        str | None,
        Option(
            metavar="FILE.html",
            help="File [default: RUN/report.html; for several runs RUN/comparison.html]",
        ),
    ] = None,
) -> None:
    """Write an HTML report of one or more runs."""
    from ssdctl.reporting.page import write_report
    from ssdctl.runs.run import default_report, open_runs

    named = runs or [name_newest_run(call.console, has_checkpoint=False)]
    contents = open_runs([Path(run) for run in named])
    target = Path(out) if out else default_report(named)
    write_report(contents, target)
    call.console.result({"file": str(target)}, f"report: {target}")
    has_checkpoints = any(RunDir(Path(named[0])).checkpoints.glob("*.pt"))
    command = f"ssdctl predict {quoted(named[0])} photo.jpg --out drawn"
    call.console.closing([], [command] * has_checkpoints)


def _table(found: list[dict[str, Any]], lines: list[str]) -> Group:
    from rich.console import Group

    texts = {name: [r[name] for r in found] for name in ("path", "date", "data", "network")}
    columns = {"run": texts.pop("path"), **texts, "steps": [f"{r['steps']:,}" for r in found]}
    columns["AP"] = [format_score(r["ap"]) for r in found]
    folded = ("run", "data")
    for name in ("date", "data", "network"):  # left out if the terminal is too narrow
        widths = [MIN_WIDTH if n in folded else max(map(len, [n, *columns[n]])) for n in columns]
        if sum(widths) + 2 * len(widths) > rich_console(sys.stdout).width:
            del columns[name]
    rows = list(zip(*columns.values(), strict=True))
    runs = table(*columns, rows=rows, left=range(len(columns) - 2))
    for column in runs.columns:
        if column.header in folded:
            column.overflow, column.min_width = "fold", MIN_WIDTH
        else:
            column.no_wrap = True
    states = [f"{r['path']}: {r['state']}" for r in found if r["state"]]
    return Group(runs, *lines, *states)


EveryCheckpoint = Annotated[
    bool, Option("--all", help="Score every checkpoint of a run, in one table")
]
DetectionsFile = Annotated[
    str | None, Option(metavar="FILE", help="Write the detections as COCO results")
]
SuspectsFile = Annotated[
    str | None,
    Option(metavar="FILE.csv", help="Write the labels that look wrong, the worst first"),
]
Other = Annotated[
    str | None,
    Option(metavar="B", help="Compare with another checkpoint, run or file of detections"),
]
FailIfWorse = Annotated[
    bool, Option("--fail-if-worse", help="Exit with 10 if --against B is better")
]
WhatToScore = Annotated[
    list[str] | None,
    Argument(
        metavar="CKPT|RUN...|DETECTIONS.json",
        help="Checkpoint, ONNX file, run folder, detector, hf://org/name, or COCO results; or the "
        "runs of all folds [default: the newest run]",
    ),
]


@command(
    "evaluate",
    short="--data --split --bs --bf16 --fp32 --device --limit --report --against --all",
    panel="Results",
    settings="data.* evaluate.*",
    examples=[
        "ssdctl evaluate   # the newest run of runs/",
        "ssdctl evaluate runs/coco-resnet34/checkpoints/best.pt",
        "ssdctl evaluate ckpt.pt --data /data/coco --json",
        "ssdctl evaluate ckpt.pt --report evaluation   # a page with errors by type",
        "ssdctl evaluate runs/coco-resnet34 --all   # every checkpoint of the run",
        "ssdctl evaluate new.pt --against best.pt --fail-if-worse   # is it better?",
        "ssdctl evaluate runs/coco-resnet34 --suspects suspects.csv   # labels that look wrong",
        "ssdctl evaluate runs/parts-resnet34-fold*   # all folds as one set",
        "ssdctl evaluate detections.json --data /data/coco --verify",
        "ssdctl launch --gpus 8 -- evaluate ckpt.pt",
    ],
)
def evaluate(
    call: Call,
    what: WhatToScore = None,
    every: EveryCheckpoint = False,
    detections: DetectionsFile = None,
    report: Annotated[str | None, Option(metavar="DIR", help="Write an HTML report to DIR")] = None,
    suspects: SuspectsFile = None,
    against: Other = None,
    fail_if_worse: FailIfWorse = False,
) -> None:
    """Compute COCO AP for a checkpoint, a run's best checkpoint, or a file of detections.

    Checkpoints remember their dataset and precision, so you can omit --data. The result lists the
    classes, and how much AP50 each type of error costs.
    """
    from ssdctl.checkpoint.locate import is_model_folder
    from ssdctl.data.store_folder import refuse_in_dataset

    named = what or [name_newest_run(call.console)]
    is_run = Path(named[0]).is_dir() and not is_model_folder(Path(named[0]))
    if every and not is_run:
        raise UsageError(f"--all: {named[0]} is not a run folder", hint="leave --all out")
    if len(named) > 1 and (every or against):
        raise UsageError("--all and --against take one run, several are the folds of one set")
    files = _files(call, named, every)
    if against is not None:
        if every or detections or report or suspects:
            raise UsageError("--against excludes --all, --detections, --report and --suspects")
        _compare(call, files[0], against, fail_if_worse=fail_if_worse)
        return
    if fail_if_worse:
        raise UsageError("--fail-if-worse without --against", hint="add --against B")
    if report is not None:
        make_report_dir(Path(report))  # before the detection, which may take hours
    for option, file in (("--detections", detections), ("--suspects", suspects)):
        if file is not None and not _is_in_run(Path(file)):
            refuse_in_dataset(Path(file), option=option)
    if suspects is not None:
        from ssdctl.evaluation.suspects import COLUMNS

        require_own_file(Path(suspects), "--suspects", ",".join(COLUMNS))
        if detections and Path(detections).resolve() == Path(suspects).resolve():
            raise UsageError(f"--detections and --suspects: both name {suspects}")
    found: list[DetectedSplit] = []

    def keep(split: DetectedSplit) -> None:
        if suspects is not None and not split.detections.are_probabilities:
            raise UsageError(
                f"--suspects: {split.about.source} has scores outside of 0 to 1",
                hint="scale them, or leave --suspects out",
            )
        found.append(split)

    written = Path(detections) if detections else None
    evaluations = _evaluate(call, files, written, keep, are_folds=len(named) > 1)
    if not evaluations:  # not the main rank
        return
    facts = _write_suspects(found, Path(suspects)) if suspects else []
    _show(call, evaluations, facts, is_run=is_run, every=every, report=report)


def _is_in_run(file: Path) -> bool:
    """Return whether a file is in a run folder, whose files do not count as labels."""
    return any(RunDir(folder).metrics.exists() for folder in file.absolute().parents)


def _files(call: Call, named: list[str], every: bool) -> list[Path]:
    from ssdctl.checkpoint.locate import locate_checkpoint

    if every:
        return RunDir(Path(named[0])).all_checkpoints()
    return [locate_checkpoint(name, mirror=call.config.download.mirror) for name in named]


def _write_suspects(found: list[DetectedSplit], file: Path) -> list[tuple[str, str]]:
    """Write the suspects by all detections; return a fact for the end."""
    from ssdctl.evaluation.suspects import find_suspects, write_suspects

    ranked = find_suspects(found[0].truth, found[0].image_ids, [f.detections for f in found])
    write_suspects(file, ranked)
    return [("suspects", f"{len(ranked):,} labels that look wrong -> {file}")]


def _compare(call: Call, file: Path, against: str, *, fail_if_worse: bool) -> None:
    """Print the difference of two detectors.

    Raises:
        WorseError: With `fail_if_worse`, if `against` is better.
    """
    from ssdctl.checkpoint.locate import locate_checkpoint
    from ssdctl.evaluation.evaluate import compare_files

    other = locate_checkpoint(against, mirror=call.config.download.mirror)
    _be_silent_unless_main(call)
    comparison = compare_files(file, other, call.config, progress=call.console.progress)
    if comparison is None:
        return
    call.console.result(comparison.as_json(), comparison.verdict())
    if not call.console.as_json and not call.console.quiet:
        call.console.result(None, lambda: _differences(comparison))
    if fail_if_worse and comparison.better == "b":
        raise WorseError(f"{file} is worse than {other}: {comparison.verdict()}")


def _differences(comparison: Comparison) -> Group:
    """Return the metrics of two evaluations, and the differences of each class."""
    from rich.console import Group

    heads = [
        f"{name}  {headline(e)}\n   {e.about.source}"
        for name, e in (("A", comparison.a), ("B", comparison.b))
    ]
    rows = []
    entries = [("all", comparison.difference)]
    entries += [
        (c.name, d) for c, d in zip(comparison.a.per_class, comparison.per_class, strict=True)
    ]
    for label, found in entries:
        rows.append([label, *(str(found.get(name, "-")) for name in ("AP", "AP50"))])
    classes = table("class", "AP, B - A", "AP50, B - A", rows=rows)
    has_intervals = any(found for _, found in entries)
    return Group("", *heads, "", classes, *["", INTERVALS] * has_intervals)


def _show(
    call: Call,
    evaluations: list[Evaluation],
    facts: list[tuple[str, str]],
    *,
    is_run: bool,
    every: bool,
    report: str | None,
) -> None:
    """Print the evaluations of one checkpoint or of `every` checkpoint of a run."""
    best = max(evaluations, key=lambda e: e.metrics["AP"])
    results = [{"checkpoint": e.about.source, **e.as_json()} for e in evaluations]
    if every:
        call.console.result({"checkpoints": results}, lambda: _checkpoints(evaluations, best))
    else:
        call.console.result(results[0] if is_run else best.as_json(), headline(best))
        if not call.console.as_json and not call.console.quiet:
            call.console.result(None, lambda: tables(best))
    if report is not None:
        from ssdctl.reporting.page import write_evaluation_report

        facts.append(("report", str(write_evaluation_report(best, Path(report)))))
    if best.about.precision is None or ", " in best.about.source:  # detections, or several folds
        call.console.closing(facts)
        return
    facts.insert(0, ("best" if every else "checkpoint", best.about.source))
    source = quoted(best.about.source)
    next_commands = [f"ssdctl predict {source} photo.jpg --out drawn"]
    if report is None:
        words = ["ssdctl evaluate", source, *_chosen_options(call), "--report evaluation"]
        next_commands.append(" ".join(words))
    call.console.closing(facts, next_commands)


def _chosen_options(call: Call) -> list[str]:
    chosen, sources = values(call.config), call.config.sources
    options = [f"--config {quoted(call.config_file)}"] if call.config_file else []
    for setting in select("data.*", "evaluate.*"):
        is_typed = sources[setting.path].kind is Kind.CALL
        if is_typed and chosen[setting.path] is not None:
            options.append(setting.as_option(chosen[setting.path]))
    return options


def _evaluate(
    call: Call,
    files: list[Path],
    detections: Path | None,
    on_detected: Callable[[DetectedSplit], None],
    *,
    are_folds: bool,
) -> list[Evaluation]:
    """Score all files; return an empty list on ranks other than the main one."""
    from ssdctl.evaluation.evaluate import evaluate_files, evaluate_folds

    evaluations, is_main = [], _be_silent_unless_main(call)
    for evaluation in (evaluate_folds if are_folds else evaluate_files)(
        files,
        call.config,
        progress=call.console.progress,
        detections_file=detections,
        on_detected=on_detected,
    ):
        if not is_main:
            continue
        evaluations.append(evaluation)
        if len(files) > 1 and not are_folds:  # the table comes at the end, perhaps after hours
            call.console.info(headline(evaluation))
    return evaluations


def _be_silent_unless_main(call: Call) -> bool:
    """Let only the main rank write to the terminal; return whether this is it."""
    tune_process()
    ranks = find_ranks()
    call.console.addFilter(lambda _: ranks.is_main)
    return ranks.is_main


def headline(evaluation: Evaluation) -> str:
    """Return the AP in one line: `AP 0.422  AP50 0.753  AP75 0.416 | 100 images, ...`."""
    names = ("AP", "AP50", "AP75")
    scores = "  ".join(f"{n} {_score(evaluation.metrics[n], evaluation, n)}" for n in names)
    about = evaluation.about
    objects = sum(entry.objects for entry in evaluation.per_class)
    facts = [counted(about.images, "image"), counted(objects, "object"), about.precision]
    return f"{scores} | {', '.join(filter(None, facts))}"


def tables(evaluation: Evaluation) -> Group:
    """Return tables of the classes, the other metrics, and the errors by type."""
    from rich.console import Group

    from ssdctl.evaluation.analysis import ERROR_NAMES, diagnosis

    about, metrics = evaluation.about, evaluation.metrics
    others = [(SIZES, "AP by size"), (RECALLS, "AR")]
    lines = [
        f"{title:<10}  " + "  ".join(f"{n} {_score(metrics[n], evaluation, n)}" for n in names)
        for group, title in others
        if (names := _present(evaluation, group))
    ]
    rows = [
        [ERROR_NAMES.get(e.kind, e.kind), f"+{e.delta_ap:.3f}", f"{e.count:,}", e.meaning]
        for e in sorted(evaluation.errors, key=lambda e: -e.delta_ap)
    ]
    errors = table("error type", "AP50 gain", "count", "meaning", rows=rows, left=(0, 3))
    has_intervals = evaluation.intervals or any(entry.intervals for entry in evaluation.per_class)
    counted = f"{INTERVALS} " * bool(has_intervals) + "Errors are counted at IoU 0.5"
    if about.score_threshold is not None:
        counted += f", among detections with a score of at least {about.score_threshold:g}"
    return Group(
        "", _classes(evaluation), "", *lines, "", errors, "", diagnosis(evaluation), f"{counted}."
    )


def _classes(evaluation: Evaluation) -> Table:
    """Return the table of the classes, with their AP by size if the terminal has the width."""
    console = rich_console(sys.stdout)
    unlimited = console.options.update_width(1000)  # columns: by itself, it fits every table
    for sizes in (_present(evaluation, SIZES), []):
        rows = [
            [
                entry.name,
                *(_score(getattr(entry, name), entry, name) for name in ("AP", "AP50")),
                *(format_score(getattr(entry, name)) for name in sizes),
                f"{entry.objects:,}",
            ]
            for entry in evaluation.per_class
        ]
        classes = table("class", "AP", "AP50", *sizes, "objects", rows=rows)
        if console.measure(classes, options=unlimited).maximum <= console.width:
            break
    return classes


def _checkpoints(evaluations: list[Evaluation], best: Evaluation) -> Group:
    from rich.console import Group

    names = ["AP", "AP50", "AP75", *_present(best, SIZES), "AR100"]
    rows = []
    for evaluation in evaluations:
        mark = "  (best)" if evaluation is best else ""
        scores = [format_score(evaluation.metrics[name]) for name in names]
        file = Path(evaluation.about.source).name
        rows.append([str(evaluation.about.step), *scores, file + mark])
    columns = table("step", *names, "checkpoint", rows=rows, left=(len(names) + 1,))
    return Group(columns, "", headline(best))


def _present(evaluation: Evaluation, names: tuple[str, ...]) -> list[str]:
    """Return the metrics with a value; sizes without objects have no AP."""
    return [name for name in names if evaluation.metrics.get(name, -1) >= 0]


def _score(value: float, of: Evaluation | ClassAnalysis, name: str) -> str:
    """Format a score with its 95% interval: `0.423 [.38, .47]`."""
    from ssdctl.runs.evaluation import interval_text

    return format_score(value) + interval_text(of.intervals, name)


def format_score(value: float | None) -> str:
    """Format a score; -1 means that the split has no objects of this kind."""
    return "-" if value is None or value < 0 else f"{value:.3f}"
