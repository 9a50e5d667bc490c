"""A run folder: its file names, its default place, its lock, and environment.json.

The first rank locks `RUN/.lock`, which contains its process id and host, so that no second process
trains in the folder. The kernel releases a lock when the process ends, so a dead run never blocks a
new one. On a file system without locks nothing is checked.
"""

from __future__ import annotations

import contextlib
import filecmp
import logging
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ssdctl.config import Config
from ssdctl.config.sections import DEFAULT_PRESET
from ssdctl.data.store_folder import default_root
from ssdctl.errors import DataError, UsageError
from ssdctl.files import (
    DECODE_ERRORS,
    make_dir,
    msgspec_type,
    read_limited,
    reason_of,
    refuse_other_file,
    require_own_file,
    try_lock,
    write_bytes,
)
from ssdctl.runtime.packages import package_version
from ssdctl.runtime.safe_text import quoted, redact_arguments
from ssdctl.runtime.system import is_process_running

# How the files of a report begin.
PAGE = r"""(?s:\s*<!doctype html.*<meta name="generator" content="ssdctl )"""
EVALUATION = r'\s*\{\s*"about"'
RUNS = Path("runs")  # the folder of runs without --out
FILE_SUFFIX = re.compile(r"\.(pt|pth|safetensors)$")
UPLOAD_PREFIX = ".upload-"  # of folders for checkpoints that trackers upload
STEP_NAME = re.compile(r"step-[0-9]{8,}\.pt")
WAIT_S = 10.0  # the processes of a killed launch take some seconds to end
POLL_S = 0.2
MAX_OWNER = 300  # characters of process id and host name

log = logging.getLogger(__name__)
MAX_ENVIRONMENT_BYTES = 1 << 20
GIT_S = 10.0  # seconds that git may take
PACKAGES = ("ssdctl", "torch", "torchvision", "numpy", "pillow", "pyarrow", "hotcoco")


class RunDir:
    """The paths of a run folder; none of them need exist."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock = path / ".lock"
        self.config = path / "config.toml"  # the settings that explain the result, with sources
        self.environment = path / "environment.json"  # versions, device, command
        self.metrics = path / "metrics.jsonl"  # one record per line
        self.evaluation = path / "evaluation.json"  # the best one
        self.resumed_from = path / "resumed-from.json"  # the FILE of --resume FILE
        self.report = path / "report.html"
        self.logs = path / "logs"  # output of the ranks other than the first
        self.nonfinite = path / "nonfinite"  # images of the steps with a NaN or infinite loss
        self.profile = path / "profile"  # traces of --profile
        self.tensorboard = path / "tensorboard"  # event files; wandb makes a folder wandb/
        self.tracker_id = path / "tracker-id"  # the run's id in every tracker
        # A killed run resumes from the last intact one.
        self.checkpoints = path / "checkpoints"
        self.last = self.checkpoints / "last.pt"
        self.best = self.checkpoints / "best.pt"

    def __str__(self) -> str:
        return str(self.path)

    def rank_log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def step_checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}.pt"

    def step_checkpoints(self) -> list[Path]:
        """Return the checkpoints of steps, the oldest first."""
        files = [p for p in self.checkpoints.glob("step-*.pt") if STEP_NAME.fullmatch(p.name)]
        return sorted(files, key=step_of)

    def resumable(self) -> list[Path]:
        """Return step-N.pt, the oldest first; if there is none, best.pt and last.pt."""
        links = [path for path in (self.best, self.last) if path.is_file()]
        return self.step_checkpoints() or links

    def all_checkpoints(self) -> list[Path]:
        """Return the checkpoints to evaluate: the best, unless it is a recent one, and those.

        Raises:
            UsageError: The folder has none.
        """
        files = self.step_checkpoints()
        # In a copy of a run folder, the best is no longer a link to a recent one.
        is_recent = (filecmp.cmp(self.best, f, shallow=False) for f in files)
        if self.best.is_file() and not any(is_recent):
            files.insert(0, self.best)
        if not files:
            raise _no_checkpoints(self.path)
        return files

    def is_started(self) -> bool:
        """Return whether the folder has files of a run, other than the lock and the rank logs."""
        others = (self.lock, self.logs)
        return self.path.is_dir() and any(entry not in others for entry in self.path.iterdir())

    def require_own_files(self) -> None:
        """Refuse a folder that is no run, in which files of others would be replaced."""
        if self.resumable():
            return
        require_own_file(self.metrics, "--out", r'\{"kind": "event", "step": ')
        if self.metrics.is_file() and self.metrics.stat().st_size:
            return
        require_own_file(
            self.config, "--out", r"\[data\]\n(# )?root =.*\n(# )?store =.*  # .*\n(# )?tile ="
        )
        require_own_file(self.environment, "--out", r'\{\s*"python": ".*",\s*"platform": ')
        if self.evaluation.exists():
            refuse_other_file(self.evaluation, "--out")


def evaluation_of(checkpoint: Path) -> Path:
    """Return the details of the evaluation of step-N.pt, which are kept as long as that file."""
    return checkpoint.with_name(
        checkpoint.name.replace("step-", "evaluation-").replace(".pt", ".json")
    )


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.stem.partition("-")[2])


def find_checkpoint(path: Path) -> Path:
    """Return `path` if it is a file, else the best (or last) checkpoint of the run folder `path`.

    Raises:
        UsageError: A folder without checkpoints.
    """
    if not path.is_dir():
        return path
    run = RunDir(path.parent if path.name == RunDir(path).checkpoints.name else path)
    for checkpoint in (run.best, run.last):
        if checkpoint.is_file():
            return checkpoint
    raise _no_checkpoints(path)


def _no_checkpoints(path: Path) -> UsageError:
    if (error := tensorflow_checkpoint(path)) is not None:
        return error
    return UsageError(
        f"{path}: a folder without checkpoints",
        hint="name a run folder (train's --out) or a checkpoint file; training saves at "
        "--save-every, at evaluations and at its end",
    )


def tensorflow_checkpoint(path: Path) -> UsageError | None:
    """Return the error for a checkpoint of TensorFlow, named by its folder, prefix or file."""
    prefix = re.sub(r"\.(index|meta|data-\d+-of-\d+)$", "", path.name)
    pattern = "*" if path.is_dir() else re.sub(r"([*?[])", r"[\1]", prefix)
    folder = path if path.is_dir() else path.parent
    if not any(folder.glob(f"{pattern}.index")):
        return None
    return UsageError(
        f"{path}: a checkpoint of TensorFlow, which ssdctl cannot read",
        hint="train again, from the backbone's weights (docs/migrating.md)",
    )


def make_report_dir(path: Path) -> RunDir:
    """Make the folder of an evaluation's report.

    Raises:
        UsageError: It is a run, which keeps the evaluation of its training, or has other files of
            these names.
    """
    folder = RunDir(path)
    if folder.metrics.exists():
        raise UsageError(
            f"--report {path}: a run keeps the evaluation of its training",
            hint=f"another folder, or the run's own report: ssdctl report {quoted(path)}",
        )
    require_own_file(folder.report, "--report", PAGE)
    require_own_file(folder.evaluation, "--report", EVALUATION)
    make_dir(path)
    return folder


def run_dir(config: Config) -> RunDir:
    """Return the run folder of a config: `--out`, else `runs/DATASET-BACKBONE`.

    With --init it is `runs/DATASET-NAME`, of the detector, run or file to start from. A preset
    other than the default is added, so that runs of different recipes do not collide.
    """
    train = config.train
    if train.out:
        return RunDir(Path(train.out))
    preset = "" if train.preset == DEFAULT_PRESET else f"-{train.preset}"
    start = config.model.backbone if train.init is None else _name_of(Path(train.init))
    fold = "" if train.fold is None else f"-fold{train.fold.replace('/', 'of')}"
    root = Path(config.data.root or default_root())
    name = "fake" if train.fake_data else dataset_name(root)
    return RunDir(RUNS / f"{name}-{start}{preset}{fold}")


def with_paths_from(folder: Path, config: Config) -> Config:
    """Return a config whose relative paths were meant in a folder that is not the working one."""
    config = config.with_value("train.out", str(folder / run_dir(config).path))
    if (weights := config.model.weights_name) and (folder / weights).is_file():
        config = config.with_value("model.weights", str(folder / weights))
    if config.train.mllog is not None:
        config = config.with_value("train.mllog", str(folder / config.train.mllog))
    if config.train.resume not in ("auto", "never"):
        config = config.with_value("train.resume", str(folder / config.train.resume))
    return config


def run_of(checkpoint: Path) -> RunDir:
    """Return the folder of the run that a checkpoint belongs to: of RUN/checkpoints/FILE."""
    return RunDir(checkpoint.absolute().parent.parent)


def _name_of(checkpoint: Path) -> str:
    """Return a detector's name, the run of a run's checkpoint, or the name of another file."""
    run, checkpoint = run_of(checkpoint), checkpoint.absolute()
    is_of_run = checkpoint.parent == run.checkpoints
    return run.path.name if is_of_run else FILE_SUFFIX.sub("", checkpoint.name)


def dataset_name(root: Path) -> str:
    """Return the name of a dataset's folder; `root` may be a file in it."""
    folder = (root.parent if root.is_file() else root).absolute()
    return folder.resolve().name if folder.name == ".." else folder.name or "data"


def data_name(settings: Mapping[str, Any]) -> str:
    """Return the name of a run's data, with what `--overfit` took of it; "" if it is unknown."""
    if settings.get("train.fake_data"):
        return "fake"
    root, part = settings.get("data.root"), settings.get("train.overfit")
    name = dataset_name(Path(str(root))) if root else ""
    return f"{name} (--overfit {part})" if name and part else name


@contextlib.contextmanager
def exclusive_run(out: Path) -> Iterator[None]:
    """Create the run directory and hold an exclusive lock on it; wait up to WAIT_S for its owner.

    An owner on another machine causes only a warning: some network file systems keep the locks of
    a node that is gone, and its run must be able to continue elsewhere.

    Raises:
        UsageError: Another process of this machine trains in it.
        DiskError: The folder cannot be created.
    """
    is_new = not out.is_dir()
    path = RunDir(make_dir(out)).lock
    descriptor = _wait_for_lock(path)
    if descriptor is None:
        _refuse_owner(out, *_owner(path))
        yield
        return
    path, process = path.absolute(), os.getpid()  # the program may change its folder, and fork
    try:
        with contextlib.suppress(OSError):  # a full disk is reported by the first save
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{process} on {socket.gethostname()}".encode())
        yield
    finally:
        is_owner = os.getpid() == process
        with contextlib.suppress(OSError):  # the file system may be gone: raise why the run ended
            if is_owner:
                path.unlink()
        os.close(descriptor)
        if is_new and is_owner:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # empty if the run was refused


def _refuse_owner(out: Path, process: str, host: str) -> None:
    if (process, host) == (str(os.getpid()), socket.gethostname()):
        raise UsageError(
            f"{out}: this process already has a Trainer of this run",
            hint="close() it first; after an error in a loop without `with`, restart the kernel",
        )
    if host == socket.gethostname():
        raise UsageError(
            f"{out}: another ssdctl process trains in this folder (process {process})",
            hint="wait for it or stop it; use a different --out to run both",
        )
    text = "%s: process %s on %s seems to train in this folder too; if it is still running, stop "
    log.warning(text + "one of them", out, process or "?", host or "another machine")


def _wait_for_lock(path: Path) -> int | None:
    """Return the locked file's descriptor, or None if another process keeps the lock."""
    deadline = time.monotonic() + WAIT_S
    descriptor = try_lock(path)
    if descriptor is None:
        notice = "another ssdctl process trains in %s: waiting %.0f s for its end"
        log.info(notice, path.parent, WAIT_S)
    while descriptor is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
        make_dir(path.parent)  # an owner whose run was refused removes the empty folder
        descriptor = try_lock(path)
    return descriptor


def _owner(lock: Path) -> tuple[str, str]:
    try:
        with lock.open(errors="replace") as file:
            process, _, host = file.read(MAX_OWNER).partition(" on ")
    except OSError:
        return "", ""
    return process, host


def running_on(out: Path) -> str | None:
    """Return the name of the machine where a process trains in a folder; None if none does.

    If that is another machine, its process may have ended without removing the lock.
    """
    process, host = _owner(RunDir(out).lock)
    if not process.isdecimal():
        return None
    is_here = host == socket.gethostname()
    return None if is_here and not is_process_running(int(process)) else host


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a start of training ran on."""

    python: str
    platform: str
    device: str
    world_size: int
    packages: dict[str, str | None]  # version by name; None: not installed
    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    sources: dict[str, str]  # of the settings that are neither a preset's nor a default, by path
    folder: str = ""  # the working folder; empty if it had been deleted
    git_commit: str | None = None  # of the working folder


def find_environment(device: str, world_size: int, sources: Mapping[str, str]) -> Environment:
    """Return the environment of this process, without secrets.

    Args:
        device: Its label.
        sources: See `Environment`.
    """
    return Environment(
        python=sys.version.split()[0],
        platform=platform.platform(),
        device=device,
        world_size=world_size,
        packages={name: package_version(name) for name in PACKAGES},
        command=[_utf8(word) for word in redact_arguments(_command())],
        sources={path: _utf8(label) for path, label in sources.items()},
        folder=_utf8(_working_folder()),
        git_commit=git_commit(),
    )


def _command() -> list[str]:
    """Return the words of ssdctl's own program, or those that Python was started with."""
    if [Path(word).name for word in sys.argv[:1]] == ["ssdctl"]:
        return sys.argv
    return ["python", *sys.orig_argv[1:]]  # with the `-m` of a module


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _utf8(text: str) -> str:
    """Replace the stand-ins for bytes of names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def git_commit(folder: Path = Path()) -> str | None:
    """Return the git commit of a folder; None if it is not in a repository."""
    words = ["git", "-C", str(folder), "-c", "core.fsmonitor="]
    words += ["rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_environment(path: Path, environment: Environment) -> None:
    write_bytes(path, msgspec.json.format(msgspec.json.encode(environment), indent=2) + b"\n")


def read_environment(path: Path) -> Environment:
    try:
        return msgspec.json.decode(
            read_limited(path, MAX_ENVIRONMENT_BYTES), type=msgspec_type(Environment)
        )
    except (OSError, *DECODE_ERRORS) as error:
        raise DataError(
            f"{path}: not the environment of a run: {reason_of(error)}".replace("`", ""),
            hint="the next start of its training writes it again",
        ) from None
