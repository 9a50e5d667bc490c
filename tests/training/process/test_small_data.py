"""The rules for few images and for fine-tuning, freezing, the validation loss, and folds."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_RUN, Cli
from helpers import last, records
from torch import Tensor

from ssdctl.config import PrepareConfig
from ssdctl.data.divide import is_held_out
from ssdctl.data.open_dataset import count_images
from ssdctl.data.prepare import prepare
from ssdctl.data.tiles import Tiling
from ssdctl.errors import UsageError
from ssdctl.runs.run import Run

RUN = "--backbone tiny --backbone-weights none --workers 1 --fp32 --device cpu --log-every 1"


def test_a_run_records_the_rule(cli: Cli, shapes: Path) -> None:
    command = ["train", "--data", shapes, "--out", "run", *RUN.split()]
    result = cli(*command, "--steps", 2).expect(0)
    assert "small-data rule, fitted to --steps 2" in " ".join(result.err.split())
    assert 'optimizer = "adamw"  # small-data rule' in Path("run/config.toml").read_text()
    again = cli(*command, "--steps", 4).expect(0)
    assert "4 steps, the last 2 in" in again.out
    rates = [record["lr"] for record in records(Path("run"), "train")]
    assert rates[1] == max(rates)  # the cosine ended with step 2 and does not start again
    assert "ends at step 2" in " ".join(again.err.split())
    refused = cli(*command, "--steps", 6, "--bs", 16).expect(2, "the global batch was 8, is 16")
    assert "the schedule" not in refused.err


def fine_tune(cli: Cli, shapes: Path, tiny_run: Path, *options: object) -> dict[str, Tensor]:
    command = ["train", "--data", shapes, "--out", "tuned", "--init", tiny_run, "--steps", 3]
    result = cli(*command, "--workers", 1, "--fp32", "--device", "cpu", *options)
    result.expect(0, "fine-tuning rule")
    return last(Path("tuned")).model


def changed(before: dict[str, Tensor], after: dict[str, Tensor], part: str) -> set[str]:
    return {k for k in before if k.startswith(part) and not torch.equal(before[k], after[k])}


def test_frozen_stages_do_not_change(cli: Cli, shapes: Path, tiny_run: Path) -> None:
    before = last(tiny_run).model
    after = fine_tune(cli, shapes, tiny_run, "--freeze", 2, "--no-freeze-norm")
    for part in ("backbone.conv1", "backbone.bn1", "backbone.layer1"):
        assert any(name.startswith(part) for name in before)
        assert changed(before, after, part) == set()
    assert any(name.endswith("running_mean") for name in changed(before, after, "backbone.layer2"))
    assert "backbone.layer3.0.conv1.weight" in changed(before, after, "backbone.layer3")


def test_fine_tuning_takes_the_checkpoints_network(cli: Cli, shapes: Path, tiny_run: Path) -> None:
    """The default preset is a ResNet-34, the checkpoint a ResNet-18; batches of 4 are small.

    A log file in the run folder does not make it a run to resume.
    """
    Path("tuned").mkdir()
    Path("tuned/train.log").touch()  # as a shell does: ssdctl train --out tuned > tuned/train.log
    before = last(tiny_run).model
    after = fine_tune(cli, shapes, tiny_run, "--bs", 4)
    assert before.keys() == after.keys()
    assert not any("running_" in name for name in changed(before, after, ""))
    assert "backbone.bn1.weight" in changed(before, after, "backbone.bn1")


def test_the_validation_loss_is_that_of_training(cli: Cli, shapes: Path, tiny_run: Path) -> None:
    """Frozen weights at a rate of nearly 0: both losses are of the same network and images."""
    result = cli(
        "train", "--data", shapes, "--out", "run", "--init", tiny_run,
        "--overfit", 2, "--bs", 2, "--steps", 1, "--lr", 1e-12, "--freeze-norm", "--warmup", "0",
        "--workers", 1, "--fp32", "--device", "cpu", "--log-every", 1,
    )  # fmt: skip
    assert result.code == 0, result.err
    (evaluated,), (trained,) = (records(Path("run"), kind) for kind in ("eval", "train"))
    for name in ("loss", "loss_box", "loss_class"):
        assert evaluated[name] == pytest.approx(trained[name], rel=1e-3)
    assert "val loss" in result.err


def test_folds_have_the_same_size_and_more_images_move_few() -> None:
    names = [f"car{n // 5}_{n % 5}.jpg" for n in range(100)]
    for group, most in ((None, 0), (r"car(\d+)_", 5)):
        held = np.array([is_held_out(names, f"{n}/4", group) for n in range(1, 5)])
        assert (np.abs(held.sum(axis=1) - 25) <= most).all()
    more = is_held_out([*names, "new.jpg"], "1/4", None)[:-1]
    assert (more != is_held_out(names, "1/4", None)).sum() <= 2  # one more image moves few others
    clips = [
        f"{name}_{n}.jpg" for name, count in (("a", 4), ("b", 4), ("c", 30)) for n in range(count)
    ]
    assert sorted(is_held_out(clips, f"{n}/3", "^.").sum() for n in (1, 2, 3)) == [4, 4, 30]
    with pytest.raises(UsageError, match="cannot be divided"):
        is_held_out(names[:3], "1/4", None)


def test_the_runs_of_folds_are_listed_together_and_changed_data_is_named(
    shapes: Path, cli: Cli, tmp_path: Path
) -> None:
    runs = [tmp_path / "runs" / f"fold{n}" for n in (1, 2)]
    Path("link").symlink_to(shapes)
    for n, (run, data) in enumerate(zip(runs, (shapes, "link"), strict=True), 1):
        options = ("--fold", f"{n}/2", "--steps", 3, *TINY_RUN.split())
        cli("train", "--data", data, "--out", run, *options).expect(0)
        started = Run(run).started
        assert started.val_images == 12
    shutil.copytree(runs[0], tmp_path / "runs" / "again")  # the first fold twice
    assert cli("runs", tmp_path / "runs").out.count("2 of 2 folds of") == 1
    page = tmp_path / "both.html"
    assert cli("report", *runs, "--out", page).code == 0
    assert "2 of 2 folds of" in page.read_text(encoding="utf-8")
    refused = cli("evaluate", *runs, "--data", next(shapes.glob("annotations/*val*")))
    refused.expect(2, "not the dataset of its fold")
    cli("evaluate", *runs, "--split", "val").expect(2, "not on another split")
    moved, fold = shutil.copytree(shapes, "moved"), ("evaluate", "--limit", 1, "--json")
    shutil.rmtree("moved/prepared")
    both = [cli(*fold, *runs, "--data", data).expect(0) for data in (shapes, moved)]
    first, second = (json.loads(result.out)["AP"] for result in both)
    assert first == second
    same = ("--data", f"{shapes}/../{shapes.name}", "--config", runs[0] / "config.toml")
    scored = cli("evaluate", *runs, "--limit", 1, *same)
    assert (scored.code, "divided in another way" in scored.err) == (0, False), scored.err
    with (runs[0] / "metrics.jsonl").open("a") as file:  # of a start with other images
        event = {"kind": "event", "event": "x", "image_ids": "", "step": 0, "epoch": 0.0}
        print(json.dumps(event), file=file)
    changed = cli("evaluate", *runs, "--limit", 1)
    assert changed.err.count("divided in another way") == 1
    tune = ("train", "--data", shapes, "--steps", 1, "--init")
    for n, option, count in ((2, "--dry-run", 0), (1, "--dry-run", 1), (1, "-q", 1)):
        tuned = cli(*tune, runs[n - 1], "--fold", f"{n}/2", option, "--workers", 1).expect(0)
        assert " ".join(tuned.err.split()).count("divided in another way") == count
    other = cli("train", "--data", shapes, "--out", runs[0], "--fold", "2/2", *TINY_RUN.split())
    other.expect(2, "train.fold")


@pytest.mark.parametrize("tiling", [None, Tiling(128, 0.2)])
def test_a_plan_counts_as_prepare_does(tiling: Tiling | None, shapes: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    before = count_images(shapes, store, tiling, "1/3", None)
    prepare(shapes, store, PrepareConfig(pack=False))
    assert before[:3] == count_images(shapes, store, tiling, "1/3", None)[:3]
    assert before.trainable < count_images(shapes, store, tiling).trainable


def test_a_fold_that_does_not_exist_is_refused(cli: Cli) -> None:
    for fold in ("3/2", "0/2", "1/1", "2"):
        assert cli("train", "--fold", fold, "--dry-run").code == 2
    assert cli("train", "--group", "x", "--dry-run").code == 2
