"""Go back to an earlier step of a run: the files of the steps after it are set aside together.

`resumed-from.json` names the checkpoint that a run continued from and, until they are renamed, the
files to set aside. It is written atomically first, so a process that is killed before or after has
changed nothing or everything: the next start renames the rest.
"""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

import msgspec

from ssdctl.errors import DataError
from ssdctl.files import (
    DECODE_ERRORS,
    disk_errors,
    link_or_copy,
    msgspec_type,
    read_limited,
    reason_of,
    retry_transient,
    write_bytes,
)
from ssdctl.runs.folder import RunDir, evaluation_of, step_of
from ssdctl.runs.metrics import cut_metrics, read_metrics

MAX_BYTES = 1 << 20
RETIRED = ".retired"


class ResumedFrom(msgspec.Struct, frozen=True):
    """The checkpoint of `--resume FILE` that a run continued from."""

    file: str | None = None  # absolute, or a name in the run's `checkpoints/`
    step: int = 0
    aside: list[str] = []  # names in `checkpoints/` that are still to be renamed
    origin: str | None = None  # the last FILE of another run


def read_resumed_from(run: RunDir) -> ResumedFrom:
    try:
        return msgspec.json.decode(
            read_limited(run.resumed_from, MAX_BYTES), type=msgspec_type(ResumedFrom)
        )
    except (FileNotFoundError, NotADirectoryError):
        return ResumedFrom()
    except (OSError, *DECODE_ERRORS) as error:
        raise DataError(
            f"{run.resumed_from}: cannot be read: {reason_of(error)}",
            hint="move it away, and leave --resume out to continue the run",
        ) from None


def has_continued_from(run: RunDir, file: Path) -> bool:
    """Return whether the run has checkpoints, which came from `--resume FILE`."""
    record = read_resumed_from(run)
    return _name(run, file) in (record.file, record.origin) and bool(run.resumable())


def go_back(run: RunDir, step: int, file: Path | None, *, is_best_later: bool) -> list[Path]:
    """Set aside the files of the steps after `step`; return the checkpoints.

    Args:
        file: The checkpoint of `--resume FILE` to record; None: the one recorded before remains.
        is_best_later: Whether best.pt is of a later step.
    """
    later = [path for path in run.step_checkpoints() if step_of(path) > step]
    aside = [path.name for path in later] + [run.best.name] * is_best_later
    before = read_resumed_from(run)
    name = before.file if file is None else _name(run, file)
    names = (name, before.file, before.origin)
    origin = next((n for n in names if n is not None and Path(n).is_absolute()), None)
    if aside or file is not None:
        _write(run, ResumedFrom(name, step, aside, origin))
        finish_going_back(run)
    return later


def finish_going_back(run: RunDir) -> None:
    """Rename the files that `resumed-from.json` lists, and drop the records of their steps."""
    record = read_resumed_from(run)
    if not record.aside:
        return
    for name in record.aside:
        path = run.checkpoints / Path(name).name
        if path == run.best:
            _retire_evaluation(run)
        elif (details := evaluation_of(path)).exists():
            retry_transient(partial(retire, details))
        retry_transient(partial(retire, path))
    with disk_errors(run.last, "deleting"):
        run.last.unlink(missing_ok=True)  # it is linked again
    if run.metrics.exists() and any(r["step"] > record.step for r in read_metrics(run.metrics)[0]):
        retry_transient(partial(link_or_copy, run.metrics, retired(run.metrics)))
        retry_transient(partial(cut_metrics, run.metrics, record.step))
    _write(run, msgspec.structs.replace(record, aside=[]))


def _retire_evaluation(run: RunDir) -> None:
    if run.best.exists():  # else this was done before best.pt was renamed
        retry_transient(partial(retire, run.evaluation))


def retire(path: Path) -> None:
    with disk_errors(path, "renaming"), contextlib.suppress(FileNotFoundError):
        path.replace(retired(path))


def retired(path: Path) -> Path:
    return path.with_name(path.name + RETIRED)


def retired_files(run: RunDir) -> list[Path]:
    """Return the checkpoints that were set aside; the oldest first, the best last."""
    files = sorted(run.checkpoints.glob(f"step-*.pt{RETIRED}"))
    best = retired(run.best)
    return [*files, best] if best.exists() else files


def _name(run: RunDir, file: Path) -> str:
    file, own = file.absolute(), run.checkpoints.resolve()
    return file.name if file.parent.resolve() == own else str(file.resolve())


def _write(run: RunDir, record: ResumedFrom) -> None:
    retry_transient(partial(write_bytes, run.resumed_from, msgspec.json.encode(record) + b"\n"))
