"""Folds: each image is held out once, and the runs of all folds are scored as one set."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import TINY_RUN, Cli

from ssdctl.config import PrepareConfig
from ssdctl.data.divide import is_held_out
from ssdctl.data.open_dataset import count_images
from ssdctl.data.prepare import prepare
from ssdctl.data.tiles import Tiling
from ssdctl.errors import UsageError
from ssdctl.runs.run import Run

AT_START = {"step": 0, "epoch": 0.0}


def test_each_image_is_held_out_once_and_groups_stay_together() -> None:
    names = [f"car{n // 5}_{n % 5}.jpg" for n in range(100)]
    for group in (None, r"car(\d+)_"):
        held = np.array([is_held_out(names, f"{n}/4", group) for n in range(1, 5)])
        assert (held.sum(axis=0) == 1).all()
        assert (np.abs(held.sum(axis=1) - 25) <= (0 if group is None else 5)).all()
        if group is not None:
            assert (held.reshape(4, 20, 5).sum(axis=2) % 5 == 0).all()
    more = is_held_out([*names, "new.jpg"], "1/4", None)[:-1]
    assert (more != is_held_out(names, "1/4", None)).sum() <= 2  # one more image moves few others
    with pytest.raises(UsageError, match="cannot be divided"):
        is_held_out(names[:3], "1/4", None)


def test_the_runs_of_folds_are_listed_together_and_changed_data_is_named(
    shapes: Path, cli: Cli, tmp_path: Path
) -> None:
    runs = [tmp_path / "runs" / f"fold{n}" for n in (1, 2)]
    for n, run in enumerate(runs, 1):
        options = ("--fold", f"{n}/2", "--steps", 3, *TINY_RUN.split())
        result = cli("train", "--data", shapes, "--out", run, *options)
        assert result.code == 0, result.err
        started = Run(run).started
        assert started is not None
        assert started.val_images == 12
    for n, run in enumerate(runs, 1):  # of another training; the first fold twice
        other = shutil.copytree(run, tmp_path / "runs" / f"other{n}")
        for name, old, new in (
            ("config.toml", "seed = 0", "seed = 7"),
            ("environment.json", '"sources": {', '"sources": {"train.seed": "--seed",'),
        ):
            text = (other / name).read_text()
            assert old in text
            (other / name).write_text(text.replace(old, new))
    shutil.copytree(runs[0], tmp_path / "runs" / "again")
    listed = cli("runs", tmp_path / "runs").out
    assert listed.count("2 of 2 folds of") == 2
    assert ", seed 7: AP" in listed
    page = tmp_path / "both.html"
    assert cli("report", *runs, "--out", page).code == 0
    assert "2 of 2 folds of" in page.read_text(encoding="utf-8")
    refused = cli("evaluate", *runs, "--data", next(shapes.glob("annotations/*val*")))
    assert refused.code == 2
    assert "not on another split or dataset" in refused.err
    assert "divided in another way" not in cli("evaluate", *runs, "--limit", 1).err
    with (runs[0] / "metrics.jsonl").open("a") as file:  # of a start with other images
        print(json.dumps({"kind": "event", "event": "x", "image_ids": "", **AT_START}), file=file)
    changed = cli("evaluate", *runs, "--limit", 1)
    assert changed.err.count("divided in another way") == 1
    other = cli("train", "--data", shapes, "--out", runs[0], "--fold", "2/2", *TINY_RUN.split())
    assert other.code == 2
    assert "train.fold" in other.err


@pytest.mark.parametrize("tiling", [None, Tiling(128, 0.2)])
def test_a_plan_counts_the_same_before_and_after_prepare(
    tiling: Tiling | None, shapes: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    before = count_images(shapes, store, tiling, "1/3", None)
    prepare(shapes, store, PrepareConfig(pack=False))
    assert before[:3] == count_images(shapes, store, tiling, "1/3", None)[:3]
    assert before.trainable < count_images(shapes, store, tiling).trainable


def test_a_fold_that_does_not_exist_is_refused(cli: Cli) -> None:
    for fold in ("3/2", "0/2", "1/1", "2"):
        assert cli("train", "--fold", fold, "--dry-run").code == 2
    assert cli("train", "--group", "x", "--dry-run").code == 2
