"""A fake machine, and the doctor run on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Cli
from doctor.machines import Machine, RunDoctor


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "machine", monkeypatch)


@pytest.fixture
def run_doctor(cli: Cli) -> RunDoctor:
    """Run the doctor: its exit code, and the checks by name."""

    def run(*arguments: object) -> tuple[int, dict[str, dict[str, str]]]:
        result = cli("doctor", "--json", *arguments)
        assert result.code in (0, 2), result.err
        return result.code, {check["name"]: check for check in json.loads(result.out)}

    return run
