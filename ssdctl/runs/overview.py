"""Find run folders and summarize them for `ssdctl runs`. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ssdctl.errors import SsdctlError, UsageError
from ssdctl.runs.layout import RUNS, RunDir
from ssdctl.runs.lock import running_on
from ssdctl.runs.reader import read_run

DEPTH = 3  # of the folders that are searched
MAX_NAMED = 3  # runs in a hint


class RunSummary(NamedTuple):
    """One run in a list."""

    path: Path
    time: float  # of its last record, in seconds since 1970
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
    return sorted(map(_summary, _run_folders(folder)), key=lambda run: -run.time)


def newest_run(folder: Path = RUNS, *, has_checkpoint: bool = True) -> Path:
    """Return the run folder that was written last.

    Args:
        folder: Where to search.
        has_checkpoint: Only runs that saved a checkpoint.

    Raises:
        UsageError: There is none; the hint names runs elsewhere.
    """
    runs = [
        path
        for path in _run_folders(folder)
        if not has_checkpoint or RunDir(path).best.is_file() or RunDir(path).last.is_file()
    ]
    if runs:
        return max(runs, key=_time)
    what = "run with a checkpoint" if has_checkpoint else "run"
    others = sorted(_run_folders(Path()), key=_time, reverse=True)[:MAX_NAMED]
    start = "`ssdctl train --data DIR` starts one"
    named = f"name one of {', '.join(map(str, others))}" if others else "name one"
    raise UsageError(f"no run named, and {folder}/ has no {what}", hint=f"{named}; {start}")


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
    return RunSummary(
        path,
        time,
        (data.parent if data.suffix else data).name,
        str(run.settings.get("model.backbone") or ""),
        max((record["step"] for record in (*run.train, *run.evals)), default=0),
        None if run.best is None else run.best.get("AP"),
        "; ".join([f"running on {host}"] * bool(host) + [*run.problems]),
    )
