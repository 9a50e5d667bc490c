"""Settings and sources that a command line has always led to (`tests/golden/settings.json`).

The file was written by the version before `Source` and `finalize`. Settings that are added later may
be missing in it; the others keep their value and the text of their source.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from conftest import Result

from ssdctl.config.settings import all_settings

GOLDEN = Path(__file__).parents[2] / "golden/settings.json"
PRESETS = all_settings()["train.preset"].choices
FILE = """\
[train]
bs = 16
warmup = 3
decay_bias_and_norm = true
decay_epochs = [10, 20.5]

[model]
backbone-path = "imagenet-v2"

[launch]
cluster = "voyager"
nodes = 2

[kubernetes]
volumes = ["/a:/b", "c:/d:ro"]
"""
OPTIONS = {
    "plain": "",
    "file": "--config file.toml",
    "preset and interval": "--preset nvidia-r50 --eval-every 2 --save-every 10min --keep 3",
    "aliases": "-b 8 --learning-rate 0.01 --wd 0 --num-workers 3 --dtype bf16 -e 4",
    "auto": "--bs auto --execution compile --no-amp --no-freeze-stem",
    "set": "--set train.bs=4 --set evaluate.nms_iou=0.4 --set train.eval_at=1,2.5 --set train.tracker=a",
    "over the file": "--config file.toml --bs 3 --preset habana-tf-r34 --lr 1e-4",
    "lists": "--tracker wandb --tracker mlflow --decay-epochs 1,2 --eval-at 3",
    "few images": "--overfit 4 --limit-train 9 --init x.pt --ema 0.99 --freeze 2 --freeze-norm",
    "data": "--data some/where --store else/where --fake-data --seed 7 --profile 3,4",
}
ENVIRONMENT = {
    "environment": {"SSDCTL_TRAIN__BATCH_SIZE": "5", "SSDCTL_TRAIN__OUT": "there"},
    "empty variable": {"SSDCTL_TRAIN__OUT": "", "SSDCTL_TRAIN__DETERMINISTIC": "true"},
}
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

Cli = Callable[..., Result]
Settings = dict[str, list[Any]]


def shown(cli: Cli, options: str) -> Settings:
    """Return value and source of each setting that `config show` prints."""
    Path("file.toml").write_text(FILE)
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


def golden() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(GOLDEN.read_text())
    return content


def kept(settings: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the settings of that version, without those that a later one changed on purpose."""
    return {key: settings[key] for key in keys if key not in CHANGED_SINCE}


def expected(name: str) -> Settings:
    """Return the settings of a case: those of the plain command, and what differs."""
    shown_before = golden()["config show"]
    settings: Settings = {**shown_before["plain"], **shown_before[name]}
    return settings


@pytest.mark.parametrize("name", [*PRESETS, *OPTIONS])
def test_settings_and_sources_of_options(cli: Cli, name: str) -> None:
    before = expected(name)
    now = shown(cli, OPTIONS.get(name, f"--preset {name}"))
    assert kept(now, before) == kept(before, before)


@pytest.mark.parametrize("name", list(ENVIRONMENT))
def test_settings_and_sources_of_variables(
    cli: Cli, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in ENVIRONMENT[name].items():
        monkeypatch.setenv(variable, value)
    before, now = expected(name), shown(cli, "")
    assert kept(now, before) == kept(before, before)


@pytest.mark.parametrize("name", list(RUNS))
def test_config_file_of_a_run(cli: Cli, shapes: Path, name: str) -> None:
    before = golden()["config.toml"]
    lines = {**before["small data"], **before[name]}
    now = snapshot_lines(cli, shapes, RUNS[name])
    assert kept(now, lines) == kept(lines, lines)


def rows(cases: dict[str, Any]) -> str:
    """Return JSON with a line per case."""
    return "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in cases.items()) + "\n}"


if __name__ == "__main__":  # write the file, with the version that is installed
    import os
    import tempfile

    from conftest import run_cli

    from ssdctl.data.shapes import generate

    os.chdir(tempfile.mkdtemp())
    generate(Path("shapes"), num_train=24, num_val=9, seed=0)
    show: dict[str, Settings] = {}
    for name, options in {**OPTIONS, **{p: f"--preset {p}" for p in PRESETS}}.items():
        show[name] = shown(run_cli, options)
    for name, variables in ENVIRONMENT.items():
        os.environ.update(variables)
        show[name] = shown(run_cli, "")
        for variable in variables:
            del os.environ[variable]
    plain = show["plain"]
    for name in set(show) - {"plain"}:
        show[name] = {k: v for k, v in show[name].items() if plain[k] != v}
    files: dict[str, dict[str, str]] = {}
    for name, options in RUNS.items():
        files[name] = snapshot_lines(run_cli, Path("shapes").absolute(), options)
        shutil.rmtree("run")
    first = files["small data"]
    for name in set(files) - {"small data"}:
        files[name] = {k: v for k, v in files[name].items() if first[k] != v}
    GOLDEN.write_text(f'{{\n"config show": {rows(show)},\n"config.toml": {rows(files)}\n}}\n')
