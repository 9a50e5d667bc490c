"""Read a run folder: metrics, config, environment, checkpoints, its best evaluation.

A folder of `evaluate --report` contains only an evaluation; it is read too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ssdctl.config.render import SNAPSHOT_SECTIONS
from ssdctl.config.resolve import MAX_FILE_BYTES, read_toml
from ssdctl.errors import DataError, SsdctlError, UsageError
from ssdctl.files import DECODE_ERRORS, read_limited
from ssdctl.runs.evaluation import Evaluation, read_evaluation
from ssdctl.runs.layout import RUNS, RunDir, running_on, step_of
from ssdctl.runs.metrics import Record, is_number, read_metrics
from ssdctl.runtime.safe_text import listed, redact_arguments, redact_urls

MAX_ENVIRONMENT_BYTES = 1 << 20
MAX_REPORT_BYTES = 1 << 28  # prepare's report; ten million findings
EVENT_KEYS = ("kind", "step", "epoch", "event")
DEPTH = 3  # levels of folders that are searched
MAX_NAMED = 3  # runs in a hint


class RunData(NamedTuple):
    name: str
    path: Path
    evaluation: Evaluation | None
    settings: dict[str, Any]  # of the run, by path
    environment: dict[str, Any]
    train: Sequence[Record] = ()
    evals: Sequence[Record] = ()
    events: Sequence[Record] = ()
    config: str = ""  # config.toml with its comments; empty without training
    problems: Sequence[str] = ()  # parts of the folder that were skipped, and why

    @property
    def best(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation: of training, else the one in the folder."""
        if self.evals:
            record = max(self.evals, key=lambda r: r["AP"])
            return {k: v for k, v in record.items() if is_number(v)}
        return self.evaluation.metrics if self.evaluation else None

    @property
    def class_ap(self) -> dict[str, float]:
        """AP per class of the best evaluation."""
        if found := self.class_ap_at((self.best or {}).get("step")):
            return found
        return {c.name: c.AP for c in self.evaluation.per_class} if self.evaluation else {}

    def class_ap_at(self, step: float | None) -> dict[str, float]:
        """AP per class of training's evaluation at a step; empty if there is none."""
        for event in reversed(self.events):
            is_wanted = (event["event"], event["step"]) == ("class_ap", step)
            if is_wanted and isinstance(ap := event.get("AP"), dict):
                return {k: float(v) for k, v in ap.items() if is_number(v)}
        return {}

    @property
    def started(self) -> dict[str, Any]:
        """What the first start of training recorded; empty without one."""
        return next((e for e in self.events if e["event"] == "started"), {})

    @property
    def duration_s(self) -> float | None:
        """Seconds that training took; None if unknown, as after a crash."""
        totals = [e.get("total_s") for e in self.events if e["event"] in ("finished", "stopped")]
        starts = sum(e["event"] == "started" for e in self.events)
        known = [t for t in totals if is_number(t)]
        return sum(known) if known and len(known) == starts else None

    @property
    def chosen_settings(self) -> list[tuple[str, str, str]]:
        """The settings that neither a preset nor a default gave: name, value, source."""
        rows, section = [], ""
        for line in self.config.splitlines():
            if header := re.fullmatch(r"\[(.+)\]", line):
                section = header[1]
            elif (row := re.fullmatch(r"(\w+) = (.*)  # (.*)", line)) and not row[3].startswith(
                ("default", "preset ")
            ):
                rows.append((f"{section}.{row[1]}", row[2], row[3]))
        return rows

    @property
    def shown_events(self) -> list[tuple[int, str, str]]:
        """The events as step, name and facts in readable form."""
        shown = []
        for event in self.events:
            if event["event"] != "class_ap":
                facts = (
                    f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
                    for name, value in event.items()
                    if name not in EVENT_KEYS
                )
                shown.append((event["step"], event["event"], ", ".join(facts)))
        return shown


def read_run(path: Path) -> RunData:
    """Read a run folder.

    Raises:
        UsageError: It is not a run folder.
        DataError: One of its files is broken.
    """
    run = RunDir(path)
    data = RunData(path.resolve().name, path, read_evaluation(run.evaluation), {}, {})
    if not run.metrics.is_file():
        if data.evaluation is None:
            hint = "name a run folder: train's --out, or a folder of runs/"
            if below := sorted(_run_folders(path, 1)):
                hint = f"there are runs in it: {listed(below, MAX_NAMED)}"
            raise UsageError(f"{path}: not a run folder (it has no {run.metrics.name})", hint=hint)
        return data
    try:
        config = read_limited(run.config, MAX_FILE_BYTES).decode()
        settings = {
            key: redact_urls(value) if isinstance(value, str) else value
            for key, value, _ in read_toml(run.config)
            if key.partition(".")[0] in SNAPSHOT_SECTIONS
        }
    except (OSError, ValueError, UsageError) as error:
        raise DataError(
            f"{path}: a run folder with a broken file: {error}",
            hint=f"the next start of its training writes {run.config.name} again",
        ) from None
    environment, (records, skipped) = _environment(run.environment), read_metrics(run.metrics)
    problems = []
    if environment is None:
        problems.append(f"{run.environment.name} is not a JSON object and was skipped")
    if skipped:
        problems.append(f"{run.metrics.name}: {skipped} lines are not records and were skipped")
    return data._replace(
        train=[r for r in records if r["kind"] == "train"],
        evals=[r for r in records if r["kind"] == "eval"],
        events=[r for r in records if r["kind"] == "event"],
        config=config,
        settings=settings,
        environment=environment or {},
        problems=problems,
    )


def _environment(path: Path) -> dict[str, Any] | None:
    """Read environment.json; None if it is absent or anything but an object."""
    try:
        value = msgspec.json.decode(read_limited(path, MAX_ENVIRONMENT_BYTES))
    except (OSError, *DECODE_ERRORS):
        return None
    if not isinstance(value, dict):
        return None
    if not isinstance(value.get("packages", {}), dict):
        del value["packages"]
    if isinstance(command := value.get("command"), list):
        value["command"] = redact_arguments([str(word) for word in command])
    return value


def different_settings(runs: list[RunData]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ: key -> each run's value, None if it has none."""
    trained = [run for run in runs if run.settings]
    keys = {key for run in trained for key in run.settings}
    rows = {key: [run.settings.get(key) for run in trained] for key in sorted(keys)}
    return {k: v for k, v in rows.items() if any(value != v[0] for value in v)}


def prepare_findings(store: Path) -> list[tuple[str, str, int]]:
    """Return what prepare dropped or repaired: split, kind, count. Empty if it is unknown."""
    try:
        report = msgspec.json.decode(read_limited(store / "report.json", MAX_REPORT_BYTES))
        return [
            (split["split"], kind, count)
            for split in report["splits"]
            for kind, count in Counter(f["kind"] for f in split["findings"]).most_common()
        ]
    except (OSError, KeyError, TypeError, *DECODE_ERRORS):
        return []


def read_runs(paths: Sequence[Path]) -> list[RunData]:
    """Read several runs; if folders have the same name, enough of their paths is added to it."""
    runs = [read_run(path) for path in paths]
    path_parts = [run.path.absolute().parts for run in runs]
    names = [run.name for run in runs]
    for length in range(2, max(map(len, path_parts)) + 1):
        times = Counter(names)
        names = [
            name if times[name] == 1 else str(Path(*parts[-length:]))
            for name, parts in zip(names, path_parts, strict=True)
        ]
    return [run._replace(name=name) for run, name in zip(runs, names, strict=True)]


class RunSummary(NamedTuple):
    path: Path
    time: float  # last record, in seconds since 1970
    data: str  # the name of the dataset's folder; empty if unknown
    network: str
    steps: int
    ap: float | None  # the best; None without an evaluation
    state: str  # `running on HOST`, or what is wrong with it


def summarize_runs(folder: Path) -> list[RunSummary]:
    """Return the runs in a folder, the newest first. One with broken files is listed, too.

    Raises:
        UsageError: There is no such folder.
    """
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such folder", hint="`ssdctl train` makes runs/, `--out` another folder"
        )
    return [_summary(path) for path in newest_runs(folder)]


def newest_run(*, has_checkpoint: bool) -> Path:
    """Return the run folder in `runs/` that was written last.

    Args:
        has_checkpoint: Skip runs that saved no checkpoint.

    Raises:
        UsageError: There is none; the hint names runs elsewhere.
    """
    for path in newest_runs():
        if not has_checkpoint or RunDir(path).best.is_file() or RunDir(path).last.is_file():
            return path
    what = "run with a checkpoint" if has_checkpoint else "run"
    others = newest_runs(Path())[:MAX_NAMED]
    named = f"name one of {', '.join(map(str, others))}" if others else "name one"
    raise UsageError(
        f"no run named, and {RUNS}/ has no {what}",
        hint=f"{named}; `ssdctl train --data DIR` starts one",
    )


def newest_runs(folder: Path = RUNS) -> list[Path]:
    """Return the run folders in a folder, the one that was written last first."""
    return sorted(_run_folders(folder), key=_time, reverse=True)


def _run_folders(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the run folders in a folder, and the folder itself if it is one."""
    if RunDir(folder).metrics.is_file():
        yield folder
    elif depth:
        try:
            children = [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
        except OSError:  # not readable
            return
        for child in children:
            yield from _run_folders(child, depth - 1)


def _time(path: Path) -> float:
    try:
        return RunDir(path).metrics.stat().st_mtime
    except OSError:
        return 0.0


def _summary(path: Path) -> RunSummary:
    time = _time(path)
    try:
        run = read_run(path)
    except SsdctlError as error:
        return RunSummary(path, time, "", "", 0, None, f"broken: {error}")
    host = running_on(path)
    data = Path(str(run.settings.get("data.root") or ""))
    saved = map(step_of, RunDir(path).step_checkpoints())
    return RunSummary(
        path,
        time,
        (data.parent if data.suffix else data).name,
        str(run.settings.get("model.backbone") or ""),
        max((*saved, *(record["step"] for record in (*run.train, *run.evals))), default=0),
        None if run.best is None else run.best.get("AP"),
        "; ".join([f"running on {host}"] * bool(host) + [*run.problems]),
    )
