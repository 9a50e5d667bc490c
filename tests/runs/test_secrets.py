"""Files that are made to be shared contain no secrets of the config, environment or command."""

import sys
from pathlib import Path

import pytest

from ssdctl.config.render import SNAPSHOT_SECTIONS, snapshot, snapshot_sources, to_snapshot_toml
from ssdctl.config.resolve import Override, of_call, read_toml, resolve
from ssdctl.config.settings import all_settings
from ssdctl.launch.base import Job
from ssdctl.runs.folder import RunDir, find_environment, write_environment
from ssdctl.runs.metrics import open_run
from ssdctl.runs.run import Run

MIRROR = "https://bob:S3CRET@host/coco?X-Amz-Signature=S3CRET"
SECRETS = [
    Override("kubernetes.env", "WANDB_KEY=S3CRET,B=S3CRET", of_call("--set")),
    Override("download.mirror", MIRROR, of_call("SSDCTL_DOWNLOAD__MIRROR")),
    Override("slurm.options", "--export=TOKEN=S3CRET", of_call("config.toml:3")),
    Override("train.init", "https://bob:S3CRET@host/a.pt?S3CRET", of_call("--init")),
    Override("train.lr", "0.5", of_call("--lr")),
]
COMMAND = [
    "ssdctl", "train", "--set", "kubernetes.env=A=S3CRET,B=x S3CRET", f"--set=download.mirror={MIRROR}",
    "--set=SSDCTL_KUBERNETES__ENV=S3CRET", "--export=API_TOKEN=S3CRET", "--lr=0.5",
]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setattr(sys, "argv", COMMAND)
    run = RunDir(tmp_path / "run")
    resolved = resolve(overrides=SECRETS)
    metrics = open_run(run, 0)
    run.config.write_text(to_snapshot_toml(resolved))
    environment = find_environment("cpu", 1, snapshot_sources(resolved))
    write_environment(run.environment, environment)
    metrics.write({"kind": "event", "step": 0, "epoch": 0.0, "event": "begin"})
    return run


def test_a_run_folder_has_no_secrets_and_repeats_what_explains_the_result(run: RunDir) -> None:
    for path in run.path.rglob("*"):
        if path.is_file():
            assert "S3CRET" not in path.read_text(), path
    environment = Run(run.path).environment
    command = environment.command
    assert command[:4] == [*COMMAND[:3], "kubernetes.env=A=***,B=***"]
    assert command[-1] == "--lr=0.5"
    sections = {o.path.partition(".")[0] for o in read_toml(run.config)}
    assert sections <= set(SNAPSHOT_SECTIONS)
    assert resolve(file=str(run.config)).train.lr == 0.5
    settings = snapshot(resolve(overrides=SECRETS))
    assert "S3CRET" not in repr(settings)
    compared = {s.path for s in all_settings().values() if s.is_compared}
    assert compared <= set(settings)
    assert settings["train.lr"] == 0.5


def test_the_logged_launch_command_has_no_secrets() -> None:
    plan = Job(("torchrun", *COMMAND), {"HF_TOKEN": "S3CRET", "N": "1"}, "torchrun", 1, 1)
    assert "S3CRET" in plan.to_line()
    assert "S3CRET" not in plan.to_line(with_secrets=False)
    assert "N=1 torchrun ssdctl train" in plan.to_line(with_secrets=False)
