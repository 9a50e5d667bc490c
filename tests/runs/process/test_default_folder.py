"""The run folder that training chooses without --out."""

from __future__ import annotations

import shutil
from pathlib import Path

from ssdctl.config.resolve import Override, of_call, resolve
from ssdctl.runs.layout import run_dir


def folder(**values: object) -> str:
    """Return the run folder for settings given as `section__name`."""
    given = {key.replace("__", "."): value for key, value in values.items()}
    overrides = [Override(key, value, of_call("--x")) for key, value in given.items()]
    return str(run_dir(resolve(overrides=overrides, environment={}).config))


def test_the_name_has_dataset_network_and_preset(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts/data.yaml").touch()
    assert folder(data__root="parts") == "runs/parts-resnet34"
    assert folder(data__root=str(tmp_path / "parts/")) == "runs/parts-resnet34"
    assert folder(data__root="parts/data.yaml") == "runs/parts-resnet34"
    assert folder(data__root="parts/..") == f"runs/{tmp_path.name}-resnet34"
    assert folder(data__root="/") == "runs/data-resnet34"
    assert folder() == "runs/coco-resnet34"
    assert folder(model__backbone="resnet18", data__root="parts") == "runs/parts-resnet18"
    assert folder(train__preset="nvidia-r50") == "runs/coco-resnet50-nvidia-r50"
    assert folder(train__fake_data=True, data__root="parts") == "runs/fake-resnet34"
    assert folder(train__out="here", data__root="parts") == "here"
    (tmp_path / "versions/7").mkdir(parents=True)
    (tmp_path / "link").symlink_to("versions/7")
    assert folder(data__root="link") == "runs/link-resnet34"


def test_a_run_of_an_earlier_version_continues_in_its_folder(tiny_run: Path, shapes: Path) -> None:
    shutil.copytree(tiny_run, "runs/stable-r34")
    fits = {"data__root": str(shapes), "model__backbone": "tiny", "model__weights": "none"}
    assert folder(**fits) == "runs/stable-r34"
    assert folder(**fits, train__preset="mlperf-r34") == "runs/shapes-tiny-mlperf-r34"
    assert folder(data__root=str(shapes)) == "runs/shapes-resnet34"
    assert folder(**{**fits, "data__root": "shapes"}) == "runs/shapes-tiny"
    shutil.copytree(tiny_run, "runs/shapes-tiny")
    assert folder(**fits) == "runs/shapes-tiny"
    shutil.rmtree("runs/shapes-tiny")
    Path("runs/stable-r34/config.toml").write_text("data = 3")
    assert folder(**fits) == "runs/shapes-tiny"
