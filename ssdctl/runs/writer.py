"""Write the files of a run: config.toml, environment.json, metrics.jsonl, evaluation.json."""

from __future__ import annotations

import contextlib
import json
import re
import uuid
from collections.abc import Sequence

from ssdctl.config.render import to_snapshot_toml
from ssdctl.config.resolve import Resolved
from ssdctl.files import make_dir, remove_stale_temporaries, write_text
from ssdctl.runs.evaluation import Evaluation, write_evaluation
from ssdctl.runs.layout import RunDir
from ssdctl.runs.metrics import MetricsFile, Record


class RunWriter:
    """Writes a run folder, which it creates.

    Args:
        run: The run folder.
        resolved: The config, with the source of every value.
        environment: What the run uses: versions, device, command.
        start_step: The step from which the run continues. Later records are dropped.
    """

    def __init__(
        self,
        run: RunDir,
        resolved: Resolved,
        environment: Record,
        start_step: int,
    ) -> None:
        self._run = run
        make_dir(run.logs)
        remove_stale_temporaries(run.path)
        write_text(run.config, to_snapshot_toml(resolved))
        write_text(run.environment, json.dumps(environment, indent=2) + "\n")
        self._metrics = MetricsFile(run.metrics, start_step)

    @property
    def past_records(self) -> Sequence[Record]:
        """The records of metrics.jsonl up to the start step."""
        return self._metrics.past_records

    @property
    def last_evaluation(self) -> int | None:
        """The step of the last evaluation in metrics.jsonl."""
        return self._metrics.last_evaluation

    @property
    def past_aps(self) -> list[float]:
        """The APs of the evaluations in metrics.jsonl, in their order."""
        return self._metrics.past_aps

    def rewind(self, step: int) -> None:
        """Drop the records after `step`: those steps are trained again."""
        self._metrics = MetricsFile(self._run.metrics, step)

    def write(self, record: Record) -> Record:
        """Append a record to metrics.jsonl; return it as it is there."""
        return self._metrics.write(record)

    def tracker_id(self) -> str:
        """Return the id of the run in trackers, which is made at the first call."""
        path = self._run.tracker_id
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if re.fullmatch("[0-9a-f]{32}", text := path.read_text().strip()):
                return text
        write_text(path, (made := uuid.uuid4().hex) + "\n")
        return made

    def write_best(self, evaluation: Evaluation) -> None:
        """Keep the details of the best evaluation, for the report."""
        write_evaluation(self._run.evaluation, evaluation)
