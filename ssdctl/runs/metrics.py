"""metrics.jsonl: one JSON object per line, each step once even if a run is resumed. Torch-free."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeGuard

import msgspec

from ssdctl.errors import DataError
from ssdctl.files import (
    DECODE_ERRORS,
    disk_errors,
    make_dir,
    no_follow,
    remove_stale_temporaries,
    retry_transient,
    unreadable,
    write_text,
)
from ssdctl.runs.layout import RunDir
from ssdctl.runtime.packages import package_version
from ssdctl.runtime.safe_text import redact_arguments

log = logging.getLogger(__name__)

Record = dict[str, Any]
# The numbers that records of a kind have in addition to the step.
REQUIRED = {"train": ("epoch",), "eval": ("epoch", "AP")}
LARGEST_NUMBER = 2**63
MAX_BYTES = 1 << 30  # ten million records of training
GIT_S = 10.0  # seconds that git may take
PACKAGES = ("ssdctl", "torch", "torchvision", "numpy", "pillow", "pyarrow", "hotcoco")


class MetricsFile:
    """The metrics of a run.

    Args:
        start_step: Later records, of a killed run, are dropped: those steps are trained again.
    """

    def __init__(self, path: Path, start_step: int) -> None:
        self.path = path
        self.past_records: list[Record] = []  # that are kept
        self.rewind(start_step)

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: those steps are trained again."""
        if self.path.exists():
            self.past_records = cut_metrics(self.path, step)

    def write(self, record: Record) -> None:
        """Append one line. A power cut may lose the lines after the newest checkpoint."""
        # JSON has no NaN: -1, as in pycocotools.
        record = {
            key: -1 if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in record.items()
        }
        retry_transient(lambda: self._append(_line(record)))

    def _append(self, line: str) -> None:
        """Append a line, or nothing: a part of it would make the next one unreadable."""
        with (
            disk_errors(self.path, "writing"),
            open(self.path, "ab", buffering=0, opener=no_follow) as file,
        ):
            size = os.fstat(file.fileno()).st_size
            try:
                rest = line.encode()
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise


def cut_metrics(path: Path, step: int) -> list[Record]:
    """Rewrite a metrics file without the records after `step`; return the others."""
    records, skipped = read_metrics(path)
    if skipped:
        log.warning("%s: dropped %d lines that are not records", path, skipped)
    kept = [r for r in records if r["step"] <= step]
    if skipped or len(kept) < len(records):
        write_text(path, "".join(map(_line, kept)))
    return kept


def open_run(run: RunDir, start_step: int) -> MetricsFile:
    """Create a run folder and return its metrics.

    Args:
        start_step: The step from which the run continues. Later records are dropped.
    """
    make_dir(run.logs)
    remove_stale_temporaries(run.path)
    return MetricsFile(run.metrics, start_step)


def describe(run: RunDir, config: str, environment: Record) -> None:
    """Write the settings and the environment that a run is trained with."""
    write_text(run.config, config)
    write_text(run.environment, json.dumps(environment, indent=2) + "\n")


def read_metrics(path: Path) -> tuple[list[Record], int]:
    """Read the records of a metrics file, which may have been cut short or edited.

    Returns:
        The records, and how many lines were skipped because they are not records: broken JSON or
        text, no `kind`, or without the numbers that every record of their kind has.

    Raises:
        DataError: The file cannot be read.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(
                f"{path}: {size >> 20:,} MB; the limit is {MAX_BYTES >> 20:,} MB",
                hint="move the file away: training continues without the earlier records",
            )
        with path.open("rb") as file:
            read = [_record(line) for line in file if line.strip()]
    except OSError as error:
        raise unreadable(path, error) from None
    records = [record for record in read if record is not None]
    return records, len(read) - len(records)


def _record(line: bytes) -> Record | None:
    try:
        value = msgspec.json.decode(line)
    except DECODE_ERRORS:
        return None
    if not isinstance(value, dict) or not isinstance(kind := value.get("kind"), str):
        return None
    has_step = isinstance(value.get("step"), int)
    has_numbers = all(is_number(value.get(key)) for key in ("step", *REQUIRED.get(kind, ())))
    has_name = kind != "event" or isinstance(value.get("event"), str)
    return value if has_step and has_numbers and has_name else None


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a JSON value is a number that fits 64 bits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST_NUMBER


def _line(record: Record) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def environment(device_label: str, world_size: int) -> Record:
    """Return versions, device, command and git commit of a run, for environment.json."""
    facts = {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "device": device_label,
        "world_size": world_size,
        "packages": {name: package_version(name) for name in PACKAGES},
        "command": redact_arguments(sys.argv),
    }
    commit = git_commit()
    return facts | ({"git_commit": commit} if commit else {})


def git_commit(folder: Path = Path()) -> str | None:
    """Return the git commit of a folder; None if it is not in a repository."""
    words = ["git", "-C", str(folder), "-c", "core.fsmonitor="]
    words += ["rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
