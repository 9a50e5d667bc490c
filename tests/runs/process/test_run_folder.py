"""The run folder: its place without --out; one run at a time; a dead run's lock blocks none."""

import logging
import shutil
import socket
from pathlib import Path

import pytest
from conftest import Cli
from helpers import records, train_command

from ssdctl.config.resolve import Override, of_call, resolve
from ssdctl.errors import UsageError
from ssdctl.runs import folder as run_folder
from ssdctl.runs.folder import RunDir, exclusive_run, run_dir


def test_a_second_run_is_refused(
    cli: Cli, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "WAIT_S", 0.1)
    out = tmp_path / "run"
    train = train_command(shapes, out, "--steps", 1)
    with exclusive_run(out):
        cli(*train).expect(2, str(out))
        assert list(out.iterdir()) == [RunDir(out).lock]
    assert not out.exists()  # removed, since it is empty
    assert cli(*train, "--init", tmp_path / "none.pt").code != 0
    assert not out.exists()
    assert cli(*train, "--resume", "never").code == 0
    assert not RunDir(out).lock.exists()


@pytest.mark.parametrize(
    ("name", "code"),
    [
        *((name, 2) for name in ("config.toml", "environment.json", "metrics.jsonl")),
        *(("evaluation.json", 2), ("checkpoints/best.pt", 5), ("checkpoints/last.pt", 5)),
    ],
)
def test_files_of_others_are_kept(
    cli: Cli, shapes: Path, tmp_path: Path, checkpoint: Path, name: str, code: int
) -> None:
    run, mine = tmp_path / "run", tmp_path / "run" / name
    (run / "checkpoints").mkdir(parents=True)
    mine.write_text("[tool]")
    for options in ((), ("--resume", checkpoint)):
        cli(*train_command(shapes, run, "--steps", 4, *options)).expect(code, name)
    assert [p.read_text() for p in run.rglob("*") if p.is_file()] == ["[tool]"]


def test_a_run_without_numbered_checkpoints_continues(
    cli: Cli, shapes: Path, tmp_path: Path, tiny_run: Path
) -> None:
    for kept in ("best", "last"):
        run = shutil.copytree(tiny_run, tmp_path / kept)
        for path in (run / "checkpoints").glob("*.pt"):
            if path.name != f"{kept}.pt":
                path.unlink()
        larger = ("--accumulate", 2, "--resume-changed")
        cli(*train_command(shapes, run, "--steps", 4, *larger)).expect(2, "global batch")
        cli(*train_command(shapes, run, "--steps", 4)).expect(0)
        assert [r["step"] for r in records(run, "train")] == [1, 2, 3, 4]
    (run / "checkpoints/step-00000003.pt").replace(run / "checkpoints/best.pt")
    (run / "checkpoints/step-00000004.pt").unlink()
    back = ("--resume", run / "checkpoints/best.pt")
    cli(*train_command(shapes, run, "--steps", 4, *back)).expect(0, "step-00000004.pt: set aside")


def test_another_machines_lock_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its node may have failed, and the run must be able to continue elsewhere."""
    monkeypatch.setattr(run_folder, "WAIT_S", 0.1)
    path = RunDir(tmp_path).lock
    with exclusive_run(tmp_path):
        path.write_text("7 on elsewhere")
        with exclusive_run(tmp_path):
            (warning,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
            assert "process 7 on elsewhere" in warning
        assert path.exists()
        path.write_text(f"7 on {socket.gethostname()}")
        with pytest.raises(UsageError), exclusive_run(tmp_path):
            pass


def folder(**values: object) -> str:
    """Return the run folder for settings given as `section__name`."""
    given = {key.replace("__", "."): value for key, value in values.items()}
    overrides = [Override(key, value, of_call("--x")) for key, value in given.items()]
    return str(run_dir(resolve(overrides=overrides, environment={})))


def test_the_name_has_dataset_network_and_preset(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/data.yaml").touch()
    assert folder(data__root="parts") == "runs/parts-resnet34"
    assert folder(data__root=str(tmp_path / "parts/")) == "runs/parts-resnet34"
    assert folder(data__root="parts/data.yaml") == "runs/parts-resnet34"
    assert folder(data__root="parts/..") == f"runs/{tmp_path.name}-resnet34"
    assert folder(data__root="/") == "runs/data-resnet34"
    assert folder() == "runs/coco-resnet34"
    for init in ("five", "hf://a/five", "x/five.pt", "runs/five/checkpoints/best.pt"):
        assert folder(train__init=init) == "runs/coco-five"
    assert folder(model__backbone="resnet18", data__root="parts") == "runs/parts-resnet18"
    assert folder(train__preset="nvidia-r50") == "runs/coco-resnet50-nvidia-r50"
    assert folder(train__fake_data=True, data__root="parts") == "runs/fake-resnet34"
    assert folder(train__out="here", data__root="parts") == "here"
    (tmp_path / "versions/7").mkdir(parents=True)
    (tmp_path / "link").symlink_to("versions/7")
    assert folder(data__root="link") == "runs/link-resnet34"
