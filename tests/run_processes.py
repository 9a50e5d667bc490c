"""Start runs in child processes, and read and compare the files of runs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked import ForkedProcess

from ssdctl.checkpoint.reader import Checkpoint, read_checkpoint
from ssdctl.cli.main import main


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def last(run: Path) -> Checkpoint:
    return read_checkpoint(run / "checkpoints" / "last.pt")


def assert_same_state(actual: Checkpoint, expected: Checkpoint) -> None:
    assert actual.step == expected.step
    for name, tensor in actual.model.items():
        assert torch.equal(tensor, expected.model[name]), name
    for key, state in actual.optimizer["state"].items():
        for name, value in state.items():
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(expected.optimizer["state"][key][name])
            )


def start(*arguments: object, **variables: str) -> ForkedProcess:
    """Start `ssdctl ARGUMENTS` in a fork."""
    return ForkedProcess(lambda: main([str(a) for a in arguments]), **variables)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(mask, 16) >> (number - 1) & 1)


def wait_for(condition: Callable[[], bool], process: ForkedProcess) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_mountable(tmp_path: Path) -> bool:
    """Return whether this user may mount a disk in memory, in a namespace of its own."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "none", str(tmp_path)]
    return (
        shutil.which("unshare") is not None
        and not subprocess.run(command, capture_output=True).returncode
    )
