"""Write the files of a run: config.toml, environment.json, metrics.jsonl, tracker-id."""

from __future__ import annotations

import contextlib
import json
import re
import uuid

from ssdctl.config.render import to_snapshot_toml
from ssdctl.config.resolve import Resolved
from ssdctl.files import make_dir, remove_stale_temporaries, write_text
from ssdctl.runs.layout import RunDir
from ssdctl.runs.metrics import MetricsFile, Record


def open_run(run: RunDir, resolved: Resolved, environment: Record, start_step: int) -> MetricsFile:
    """Create a run folder, write its config and environment, and return its metrics.

    Args:
        run: The run folder.
        resolved: The config, with the source of every value.
        environment: What the run uses: versions, device, command.
        start_step: The step from which the run continues. Later records are dropped.
    """
    make_dir(run.logs)
    remove_stale_temporaries(run.path)
    write_text(run.config, to_snapshot_toml(resolved))
    write_text(run.environment, json.dumps(environment, indent=2) + "\n")
    return MetricsFile(run.metrics, start_step)


def tracker_id(run: RunDir) -> str:
    """Return the id of the run in trackers, which is made at the first call."""
    path = run.tracker_id
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if re.fullmatch("[0-9a-f]{32}", text := path.read_text().strip()):
            return text
    write_text(path, (made := uuid.uuid4().hex) + "\n")
    return made
