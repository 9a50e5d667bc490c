"""A run folder: metrics, evaluations, settings and environment.

    run = Run("runs/photos-resnet34")
    run.best_metrics["AP"], run.settings["train.lr"]

Each file is read once, when it is needed, and refused if it is broken. A folder of `evaluate
--report` contains only an evaluation: a run that was not trained.
"""

from __future__ import annotations

import base64
import contextlib
import io
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ssdctl.config.call import hints_in_messages, named_path
from ssdctl.config.render import SNAPSHOT_SECTIONS
from ssdctl.config.resolve import read_toml, resolve
from ssdctl.config.settings import DEFAULT, Config, Kind, Source, all_settings
from ssdctl.data.store_folder import real_path
from ssdctl.errors import DataError, SsdctlError, UsageError
from ssdctl.runs.evaluation import Evaluation, read_evaluation
from ssdctl.runs.folder import (
    RUNS,
    Environment,
    RunDir,
    find_checkpoint,
    read_environment,
    step_of,
)
from ssdctl.runs.metrics import ClassAP, Ended, Record, Started, events_of, read_metrics
from ssdctl.runtime.safe_text import html_table, listed, redact_urls

if TYPE_CHECKING:
    from PIL import Image

SHOWN = ("AP", "AP50", "AP75", "APs", "APm", "APl")
DEPTH = 3  # levels of folders that are searched
MAX_NAMED = 3  # runs in a hint


def folds_text(runs: Sequence[Run]) -> list[str]:
    """Return a line for the folds of each training: mean and spread of their best AP.

    Runs that differ in a chosen setting are of different trainings, which that setting names. Of
    several runs of a fold the first one counts.
    """
    trainings: dict[frozenset[tuple[str, str]], dict[str, float]] = {}
    for run in runs:
        fold, best = str(run.settings.get("train.fold") or ""), run.best_metrics
        if fold and best is not None and best["AP"] >= 0:
            found = trainings.setdefault(_chosen_recipe(run), {})
            found.setdefault(fold, float(best["AP"]))
    return [
        f"{len(found)} of {dict(recipe)['train.fold']} folds of {_label(recipe, trainings)}: AP "
        f"{statistics.mean(found.values()):.3f} \u00b1 {statistics.stdev(found.values()):.3f} "
        f"({min(found.values()):.3f} to {max(found.values()):.3f})"
        for recipe, found in trainings.items()
        if len(found) > 1
    ]


def _chosen_recipe(run: Run) -> frozenset[tuple[str, str]]:
    """Return the settings that affect a result and are not fitted to the number of images."""
    sources = dict[str, str]()
    with contextlib.suppress(DataError):
        sources = run.environment.sources if run.environment is not None else {}
    chosen = {path for path, source in sources.items() if not source.endswith("rule")}
    chosen &= {path for path, setting in all_settings().items() if setting.is_compared}
    chosen |= {"data.root", "model.backbone", "train.preset", "train.init"}
    count = str(run.settings.get("train.fold")).partition("/")[2]
    values = {path: str(run.settings.get(path) or "") for path in chosen - {"train.fold"}}
    values |= {"data.root": real_path(values["data.root"]), "train.fold": count}
    return frozenset(values.items())


def _label(recipe: frozenset[tuple[str, str]], others: Iterable[frozenset[tuple[str, str]]]) -> str:
    """Return data and network, and the settings in which others of them differ."""
    shown = _data_and_network(recipe)
    shared = frozenset.intersection(*(o for o in others if _data_and_network(o) == shown))
    own = sorted((p, value) for p, value in recipe - shared if value and p != "train.fold")
    return ", ".join([*shown, *(f"{path.partition('.')[2]} {value}" for path, value in own)])


def _data_and_network(recipe: frozenset[tuple[str, str]]) -> list[str]:
    settings = dict(recipe)
    return [Path(settings["data.root"]).name, settings["model.backbone"]]


class Run:
    """A run folder of `train` or `ssdctl train`. Functions that take a checkpoint take a run too.

    Its files are read once: to follow a run in progress, open it again.

    Args:
        path: The run folder.
        name: Name in reports; None is the folder's.

    Raises:
        ssdctl.errors.UsageError: By the properties: it is not a run folder.
        ssdctl.errors.DataError: By the properties: one of its files is broken.
    """

    @hints_in_messages()
    def __init__(self, path: str | os.PathLike[str], name: str | None = None) -> None:
        self.path = named_path("path", path)
        self.name = self.path.resolve().name if name is None else name
        self._files = RunDir(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    @property
    def is_trained(self) -> bool:
        """Whether the folder has metrics of a training, not only an evaluation."""
        return self._files.metrics.is_file()

    @cached_property
    @hints_in_messages()
    def metrics(self) -> list[Record]:
        """The records of metrics.jsonl, one dictionary each; `pandas.DataFrame(run.metrics)`."""
        if not self.is_trained:
            if self.evaluation is None:
                self._refuse()
            return []
        records, problems = read_metrics(self._files.metrics)
        if problems:
            raise DataError(
                f"{self._files.metrics}: {problems[0]}",
                hint="delete the line, or continue the run: it drops broken lines",
            )
        return records

    def _refuse(self) -> NoReturn:
        hint = "name a run folder: train's --out, or a folder of runs/"
        if below := sorted(_run_folders(self.path, 1)):
            hint = f"there are runs in it: {listed(below, MAX_NAMED)}"
        name = self._files.metrics.name
        raise UsageError(f"{self.path}: not a run folder (it has no {name})", hint=hint)

    @property
    def train(self) -> list[Record]:
        """The records of logged steps."""
        return [r for r in self.metrics if r["kind"] == "train"]

    @property
    def evals(self) -> list[Record]:
        """The records of evaluations during training."""
        return [r for r in self.metrics if r["kind"] == "eval"]

    @property
    def events(self) -> list[Record]:
        """The records of events, such as `started`, `bad_image` and `finished`."""
        return [r for r in self.metrics if r["kind"] == "event"]

    @cached_property
    @hints_in_messages()
    def evaluation(self) -> Evaluation | None:
        """The evaluation of the best checkpoint, in detail; None without one."""
        return read_evaluation(self._files.evaluation)

    @property
    @hints_in_messages()
    def best(self) -> Path:
        """The checkpoint with the best AP, else the last one.

        Raises:
            ssdctl.errors.UsageError: There is none.
        """
        if not self.path.is_dir():
            raise UsageError(f"{self.path}: no such run folder")
        return find_checkpoint(self.path)

    @property
    def best_metrics(self) -> dict[str, Any] | None:
        """The metrics of the best evaluation: AP, AP50, ... 0 to 1; None if there was none."""
        if self.evals:
            best = max(self.evals, key=lambda r: r["AP"])
            return {name: value for name, value in best.items() if name != "kind"}
        return self.evaluation.metrics if self.evaluation else None

    @property
    def class_ap(self) -> dict[str, float]:
        """AP of each class in the best evaluation."""
        if found := self.class_ap_at((self.best_metrics or {}).get("step")):
            return found
        return {c.name: c.AP for c in self.evaluation.per_class} if self.evaluation else {}

    def class_ap_at(self, step: int | None) -> dict[str, float]:
        """Return AP of each class in training's evaluation at a step; empty without one."""
        found = [e.AP for e in events_of(self.metrics, ClassAP) if e.step == step]
        return found[-1] if found else {}

    @property
    def started(self) -> Started | None:
        """What the first start of training recorded."""
        return next(iter(events_of(self.metrics, Started)), None)

    @property
    def duration_s(self) -> float | None:
        """Seconds that training took; None if unknown, as after a crash."""
        totals = [e.total_s for e in events_of(self.metrics, Ended)]
        return sum(totals) if totals and len(totals) == self._num_starts else None

    @property
    def _num_starts(self) -> int:
        return len(events_of(self.metrics, Started))

    @property
    def num_steps(self) -> int:
        """The step that training reached, by its records and its checkpoints."""
        saved = map(step_of, self._files.step_checkpoints())
        return max((*saved, *(r["step"] for r in (*self.train, *self.evals))), default=0)

    @cached_property
    @hints_in_messages()
    def settings(self) -> dict[str, Any]:
        """The values of the run's settings that are set, such as `train.lr`; empty if not trained.

        Their sources are in `environment.sources`.
        """
        if not self.is_trained:
            return {}
        try:
            return {
                path: redact_urls(value) if isinstance(value, str) else value
                for path, value, _ in read_toml(self._files.config)
                if path.partition(".")[0] in SNAPSHOT_SECTIONS
            }
        except UsageError as error:
            raise DataError(
                f"{self.path}: a run folder with a broken file: {error}",
                hint=f"the next start of its training writes {self._files.config.name} again",
            ) from None

    @property
    @hints_in_messages()
    def config(self) -> Config:
        """The settings of the run, as functions of the Python API take them."""
        own = Source(Kind.FILE, str(self._files.config))
        read = [o for o in read_toml(self._files.config) if o.source != DEFAULT]
        overrides = [o if o.source.kind >= Kind.FILE else o._replace(source=own) for o in read]
        return resolve(overrides=overrides, environment={}, default_file=False)

    @cached_property
    @hints_in_messages()
    def environment(self) -> Environment | None:
        """Versions, device, command, and the sources of settings; None if not trained."""
        return read_environment(self._files.environment) if self.is_trained else None

    @hints_in_messages()
    def report(self, out: str | os.PathLike[str] | None = None) -> Path:
        """Write the report, a self-contained HTML page, and return its path.

        Args:
            out: The file; None is report.html in the run folder.

        Raises:
            ssdctl.errors.UsageError: `out` exists, and is not a report.
            ssdctl.errors.DiskError: It cannot be written.
        """
        # The public function of the package: the layer of reports is above this one.
        target: Path = sys.modules["ssdctl"].report(self.path, out=out)
        return target

    def plot(self) -> Image.Image:
        """Return the curves of the loss and, if it was evaluated, of AP over the steps."""
        from matplotlib.figure import Figure  # late: it takes half a second
        from PIL import Image

        steps, evals = self.train, self.evals
        count = 2 if evals else 1
        figure = Figure(figsize=(5 * count, 3.5), layout="constrained")
        loss, *others = figure.subplots(1, count, squeeze=False)[0]
        losses = [(r["step"], r["loss"]) for r in steps if r["loss"] >= 0]  # -1: not finite
        loss.plot(*zip(*losses, strict=True))
        loss.set(xlabel="step", ylabel="training loss")
        for axes in others:
            for name in ("AP", "AP50", "AP75"):
                axes.plot([r["step"] for r in evals], [r[name] for r in evals], ".-", label=name)
            axes.set(xlabel="step", ylabel="AP", ylim=(0, 1))
            axes.legend()
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=100)
        return Image.open(buffer).convert("RGB")

    def __repr__(self) -> str:
        try:
            steps, best = self.num_steps, self.best_metrics
        except SsdctlError:  # not trained yet, or broken
            return f"Run({self.path})"
        ap = "" if best is None or best["AP"] < 0 else f", AP {best['AP']:.3f}"
        return f"Run({self.path}: {steps} steps{ap})"

    def _repr_html_(self) -> str:
        try:
            metrics = self.best_metrics or {}
            buffer = io.BytesIO()
            self.plot().save(buffer, "PNG")
        except SsdctlError:
            return html_table((), [], repr(self))
        heads = [name for name in SHOWN if name in metrics]
        rows = [[f"{metrics[name]:.3f}" for name in heads]] if heads else []
        image = base64.b64encode(buffer.getvalue()).decode()
        table = html_table(heads, rows, repr(self))
        return f'{table}<img src="data:image/png;base64,{image}"/>'


def different_settings(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the settings in which runs differ: key -> each run's value, None if it has none.

    Fingerprints of the labels are included if they differ.
    """
    trained = [run.settings | _labels(run) for run in runs if run.is_trained]
    keys = sorted({key for settings in trained for key in settings})
    rows = {key: [settings.get(key) for settings in trained] for key in keys}
    return {k: v for k, v in rows.items() if any(value != v[0] for value in v)}


def _labels(run: Run) -> dict[str, str | None]:
    last = events_of(run.metrics, Started)[-1:]
    names = ("training labels", "validation labels")
    return {n: v for s in last for n, v in zip(names, (s.labels, s.val_labels), strict=True)}


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """Open several runs; if folders have the same name, enough of their paths is added to it."""
    path_parts = [path.absolute().parts for path in paths]
    names = [path.resolve().name for path in paths]
    for length in range(2, max(map(len, path_parts)) + 1):
        times = Counter(names)
        names = [
            name if times[name] == 1 else str(Path(*parts[-length:]))
            for name, parts in zip(names, path_parts, strict=True)
        ]
    return [Run(path, name) for path, name in zip(paths, names, strict=True)]


def default_report(runs: Sequence[str | os.PathLike[str]]) -> Path:
    """Return the file of a run's report, or of a comparison of runs, in the folder of the first."""
    first = RunDir(Path(runs[0]))
    return first.report if len(runs) == 1 else first.path / "comparison.html"


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
    return sorted(_run_folders(folder), key=written_at, reverse=True)


def written_at(path: Path) -> float:
    """Return when the last record of a run was written, in seconds since 1970."""
    try:
        return RunDir(path).metrics.stat().st_mtime
    except OSError:
        return 0.0


def _run_folders(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    if os.path.isfile(RunDir(folder).metrics):  # noqa: PTH113 - it may be another user's
        yield folder
    elif depth:
        try:
            children = [path for path in folder.iterdir() if path.is_dir() and path.name[0] != "."]
        except OSError:  # not readable
            return
        for child in children:
            yield from _run_folders(child, depth - 1)
