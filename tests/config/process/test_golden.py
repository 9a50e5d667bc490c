"""Settings and sources that a command line has always led to (`tests/golden/settings.json`).

The file was written by the version before `Source` and `make_plan`. Settings that are added later may
be missing in it; the others keep their value and the text of their source.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli

from ssdctl.config.settings import all_settings

GOLDEN = Path(__file__).parents[2] / "golden/settings.json"
PRESETS = all_settings()["train.preset"].choices
RUNS = {
    "small data": "--epochs 1 --bs 8",
    "preset on a CPU": "--preset nvidia-r50 --steps 1 --keep 1",
    "own values": "--lr 0.01 --warmup 1st --epochs 1 --eval-every 1st --bf16",
    "overfit": "--overfit 3 --epochs 1 --limit-train 20 --eval-every 3",
    "accumulate": "--accumulate 3 --epochs 1 --save-every 1st --optimizer adamw --warmup 1st",
}
COMMON = "--device cpu --backbone tiny --extra-norm none --backbone-weights none --workers 1"

# By default an evaluation has the precision of the training now.
CHANGED_SINCE = {"evaluate.precision"}


def shown(cli: Cli, options: str) -> dict[str, list[Any]]:
    """Return value and source of each setting that `config show` prints."""
    result = cli("config", "show", "--json", *options.split())
    assert result.code == 0, result.err
    return {key: [e["value"], e["source"]] for key, e in json.loads(result.out).items()}


def snapshot_lines(cli: Cli, shapes: Path, options: str) -> dict[str, str]:
    """Return the lines of the config.toml of a run, by setting."""
    out = Path("run")
    result = cli("train", "--data", shapes, "--out", out, *COMMON.split(), *options.split())
    assert result.code == 0, result.err
    lines, section = {}, ""
    for line in (out / "config.toml").read_text().replace(str(shapes), "DATA").splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            lines[f"{section}.{line.lstrip('# ').partition(' =')[0]}"] = line
    return lines


def check(now: dict[str, Any], kind: str, first: str, name: str) -> None:
    """Compare a case: the settings of the first one, what differs, no intended changes since."""
    golden = json.loads(GOLDEN.read_text())[kind]
    before = {**golden[first], **golden[name]}
    kept = before.keys() - CHANGED_SINCE
    assert {key: now[key] for key in kept} == {key: before[key] for key in kept}


@pytest.mark.parametrize("name", PRESETS)
def test_settings_and_sources(cli: Cli, name: str) -> None:
    check(shown(cli, f"--preset {name}"), "config show", "plain", name)


@pytest.mark.parametrize("name", list(RUNS))
def test_config_file_of_a_run(
    cli: Cli, shapes: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The golden's machine computed bf16.
    monkeypatch.setattr("ssdctl.runtime.system.processor", lambda: ("AMD EPYC", True))
    check(snapshot_lines(cli, shapes, RUNS[name]), "config.toml", "small data", name)
