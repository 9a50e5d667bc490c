"""metrics.jsonl: one JSON object per line, each step once even if a run is resumed."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from ssdctl.errors import DataError
from ssdctl.files import (
    DECODE_ERRORS,
    disk_errors,
    make_dir,
    msgspec_type,
    no_follow,
    reason_of,
    remove_stale_temporaries,
    retry_transient,
    unreadable,
    write_bytes,
)
from ssdctl.runs.folder import RunDir

log = logging.getLogger(__name__)

Record = dict[str, Any]
LARGEST = 2**53  # exact as a float
Number = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)] | float
# Records of these kinds contain only numbers; these are used.
REQUIRED = {"train": ("loss", "images_per_second"), "epoch": (), "eval": ("AP", "AP50", "AP75")}
MAX_BYTES = 1 << 30  # ten million records of training


class Position(msgspec.Struct, frozen=True):
    """What every record contains."""

    step: Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
    epoch: float


class Event(Position, frozen=True):
    """Something that happened; most kinds have more facts."""

    event: str


class Started(Event, frozen=True):
    """The first record of every start of training."""

    time: datetime
    train_images: int
    val_images: int
    labels: str | None = None  # fingerprints, which other images change, too
    val_labels: str | None = None


class Ended(Event, frozen=True):
    """The last record of a start that did not crash."""

    total_s: float


class ClassAP(Event, frozen=True):
    """AP of each class in the evaluation of this step."""

    AP: dict[str, float]


# The events that are used.
EVENTS: dict[str, type[Event]] = {
    "started": Started,
    "stopped": Ended,
    "finished": Ended,
    "class_ap": ClassAP,
}
E = TypeVar("E", bound=Event)


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

    def _append(self, line: bytes) -> None:
        """Append a line, or nothing: a part of it would make the next one unreadable."""
        with (
            disk_errors(self.path, "writing"),
            open(self.path, "ab", buffering=0, opener=no_follow) as file,
        ):
            size = os.fstat(file.fileno()).st_size
            try:
                rest = line
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(size)
                raise


def cut_metrics(path: Path, step: int) -> list[Record]:
    """Rewrite a metrics file without the records after `step`; return the others."""
    records, problems = read_metrics(path)
    if problems:
        log.warning("%s: dropped %d lines that are not records", path, len(problems))
    kept = [record for record in records if record["step"] <= step]
    content = b"".join(map(_line, kept))
    if content != path.read_bytes():  # also if the last line has no end
        write_bytes(path, content)
    return kept


def open_run(run: RunDir, start_step: int) -> MetricsFile:
    """Create a run folder and return its metrics.

    Args:
        start_step: The step from which the run continues. Later records are dropped.
    """
    make_dir(run.logs)
    remove_stale_temporaries(run.path)
    return MetricsFile(run.metrics, start_step)


def read_metrics(path: Path) -> tuple[list[Record], list[str]]:
    """Read the records of a metrics file, which may have been cut short or edited.

    Returns:
        The records, and what is wrong with each line that is not one: `line 7: ...`. A last line
        without an end, which another process may be writing, is neither.

    Raises:
        DataError: The file cannot be read.
    """
    records, problems = [], []
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise DataError(
                f"{path}: {size >> 20:,} MB; the limit is {MAX_BYTES >> 20:,} MB",
                hint="move the file away: training continues without the earlier records",
            )
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    records += [_record(line)] if line.strip() else []
                except DECODE_ERRORS as error:
                    if line.endswith(b"\n"):
                        problems.append(f"line {number}: not a record: {reason_of(error)}")
    except OSError as error:
        raise unreadable(path, error) from None
    return records, [problem.replace("`", "") for problem in problems]


def _record(line: bytes) -> Record:
    """Decode a record; raise ValidationError if a part that is used is absent or wrong."""
    record = msgspec.json.decode(line, type=dict[str, Any])
    kind, values = record.get("kind"), {k: v for k, v in record.items() if k != "kind"}
    if kind == "event":
        event = msgspec.convert(values, msgspec_type(Event))
        msgspec.convert(values, msgspec_type(EVENTS.get(event.event, Event)))
    elif isinstance(kind, str) and kind in REQUIRED:
        msgspec.convert(values, msgspec_type(Position))
        msgspec.convert(values, dict[str, Number])
        if missing := [name for name in REQUIRED[kind] if name not in values]:
            raise msgspec.ValidationError(f"no {missing[0]}")
    else:
        raise msgspec.ValidationError(f"unknown kind {kind!r:.40}")
    return record


def events_of(records: list[Record], kind: type[E]) -> list[E]:
    """Return the events of a kind."""
    return [
        msgspec.convert(r, msgspec_type(kind))
        for r in records
        if EVENTS.get(r.get("event", "")) is kind
    ]


def _line(record: Record) -> bytes:
    text = json.dumps(record, allow_nan=False, ensure_ascii=False)
    return text.encode("utf-8", "replace") + b"\n"
