"""Runs and their options: what they write, how they end, what a bad step leads to, two ranks."""

import contextlib
import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, Cli
from helpers import Train, assert_same_state, last, records, start_script, train_command

import ssdctl
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.checkpoint.format import Checkpoint
from ssdctl.errors import Stopped
from ssdctl.input import augmentations, sampler
from ssdctl.input.augmentations.ssd import color
from ssdctl.runs.run import Run
from ssdctl.training.observers import Step
from ssdctl.training.trainer import Trainer


def test_run_folder_contains_the_documented_files(tiny_run: Path, shapes: Path) -> None:
    for name in ("config.toml", "environment.json", "metrics.jsonl", "logs", "checkpoints/last.pt"):
        assert (tiny_run / name).exists(), name
    train = records(tiny_run, "train")
    assert [r["step"] for r in train] == [1, 2, 3]
    keys = {"kind", "step", "epoch", "loss", "loss_box", "loss_class", "lr", "images_per_second"}
    assert keys | {"grad_norm", "data_wait", "memory_bytes"} == set(train[0])
    assert train[0]["loss"] == pytest.approx(train[0]["loss_box"] + train[0]["loss_class"])
    (evaluation,) = records(tiny_run, "eval")
    metrics = {"AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs"}
    assert metrics < set(evaluation)
    assert f'root = "{shapes}"' in (tiny_run / "config.toml").read_text()
    config = torch.load(tiny_run / "checkpoints" / "last.pt", weights_only=True)["config"]
    assert {path.partition(".")[0] for path in config} == {"data", "model", "train", "evaluate"}


def test_a_run_names_its_data_its_best_checkpoint_and_what_to_do_next(
    run: Path, train: Train, shapes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shapes)
    for same in (Path(), Path("../shapes")):
        assert "was trained on" not in train("--steps", 4, "--dry-run", data=same)
    words = train("--steps", 4)
    for text in ("ball", "ring", "tiny", "step 3", "fp32", "4 steps"):
        assert text in words
    assert f"{run / 'checkpoints/best.pt'} (AP " in words
    assert f"ssdctl predict {run} " in words
    assert f"ssdctl report {run}" in words
    finished = last(run)
    for quiet in ("-q", "--json"):
        assert "ssdctl report" not in train("--steps", 4, quiet)
    assert "step 4 of 4" in train("--steps", 4)
    assert_same_state(last(run), finished)


def test_each_epoch_has_a_record(tmp_path: Path, train: Train) -> None:
    """Seven images and batches of two: epochs end at steps 3, 7 and 10, also across a resume."""
    assert "epoch 1 done" in train("--limit-train", 7, "--steps", 5)
    train("--limit-train", 7, "--steps", 10, "--log-every", 4)
    epochs = records(tmp_path / "run", "epoch")
    assert [(r["step"], r["epoch"]) for r in epochs] == [(3, 0.8571), (7, 2.0), (10, 2.8571)]
    assert all(r["duration_s"] > 0 and r["images_per_second"] > 0 for r in epochs)
    assert [r["step"] for r in records(tmp_path / "run", "train")] == [1, 2, 3, 4, 5, 8, 10]


def test_a_run_ends_at_its_target(tmp_path: Path, train: Train) -> None:
    """The same command again has nothing to train, and leaves the records as they are."""
    run, log = tmp_path / "run", tmp_path / "log.txt"
    ends = {"--profile": "1,61", "--eval-at": "1,99", "--patience": 59, "--target-ap": 1e-6}
    options = [word for option in ends.items() for word in option]
    options += ["--steps", 60, "--eval-every", "1st", "--log-every", 0, "--mllog", log]
    words = train(*options)
    assert all(text in words for text in ("before 61", "--eval-at 99:", "--patience 59 cannot"))
    assert "--target-ap" in words
    assert last(run).step < 60
    assert f"profile of steps 1 to {last(run).step}" in words
    assert records(run, "event")[-1]["images_per_second"] > 0
    before = log.read_text(), (run / "metrics.jsonl").read_text(), Run(run).duration_s
    for more in ([], ["--steps", 1], ["--steps", 1, "--dry-run"]):
        words = train(*options, "--profile", "1,1", *more)
        assert "--profile 1,1: the run continues from step" in words
    assert (log.read_text(), (run / "metrics.jsonl").read_text(), Run(run).duration_s) == before
    assert before[2]


def test_writes_tensorboard(tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard", reason="the extra is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = tmp_path / "run"
    break_the_fourth_batch(monkeypatch)
    options = ("--tensorboard", "--save-every", "2st", "--on-nonfinite", "rollback")
    try:
        train("--steps", 5, "--deterministic", *options)
    finally:
        torch.use_deterministic_algorithms(False)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [1, 2, 3, 4, 5]
    assert events.Scalars("eval/AP")[0].value == pytest.approx(records(run, "eval")[0]["AP"])
    assert len(events.Tags()["images"]) == 4


def break_the_fourth_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make its colors infinite, as of a broken sample."""
    calls = itertools.count()

    def draw(*arguments: Any) -> Any:
        result = color.draw(*arguments)
        return result * float("inf") if next(calls) == 3 else result

    *others, _ = augmentations.load("ssd")
    broken = (*others, augmentations.Augmentation(4, draw, color.apply))
    monkeypatch.setattr(sampler, "load", lambda _: broken)


@pytest.mark.parametrize("end", ["signal", "patience", "save", "evaluate", "left", "clock"])
def test_what_happened_between_log_points_is_recorded_before_a_save(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """A resumed run does not repeat the steps before it."""
    break_the_fourth_batch(monkeypatch)
    every = "eval_every" if end == "patience" else "save_every"
    period = {"patience": "5st", "left": "5st", "clock": "0.00001min"}.get(end, "9st")
    config = ssdctl.configure(train={"patience": 1, "log_every": 0, every: period})
    told, yielded = list[int](), list[int]()

    class Listener(ssdctl.Observer):
        def on_step(self, step: Step) -> None:
            told.extend(bad.step for bad in step.skipped)

        on_report = on_step

    settings = {**TINY, "config": config, "steps": 200, "observers": [Listener()]}
    with contextlib.suppress(Stopped), Trainer(shapes, out=tmp_path, **settings) as trainer:
        for step in trainer:
            yielded += [bad.step for bad in step.skipped]
            if step.step == 5 and end == "signal":
                os.kill(os.getpid(), signal.SIGTERM)
            if step.step == 5 and end in ("save", "evaluate"):
                getattr(trainer, end)()
            if step.step == 6 and end not in ("signal", "patience"):
                break
    bad = [r["bad_step"] for r in records(tmp_path, "event") if r["event"] == "nonfinite"]
    assert bad == told == [4]
    assert yielded == [4] * (end != "signal")
    trained = [r["step"] for r in records(tmp_path, "train")]
    assert trained == [last(tmp_path).step] * (end not in ("left", "clock"))
    assert trained < [200]


@pytest.mark.parametrize("policy", ["skip", "rollback", "stop"])
def test_what_a_bad_step_leads_to(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    run, saved = tmp_path / "run", list[tuple[int, int]]()
    save = CheckpointFolder.save

    def noted(folder: CheckpointFolder, checkpoint: Checkpoint) -> None:
        saved.append((checkpoint.step, checkpoint.samples_seen))
        save(folder, checkpoint)

    break_the_fourth_batch(monkeypatch)
    monkeypatch.setattr(CheckpointFolder, "save", noted)
    code = 7 if policy == "stop" else 0
    words = train("--save-every", "2st", "--steps", 6, "--on-nonfinite", policy, code=code)
    named = json.loads((run / "nonfinite/step-00000004.json").read_text())
    assert len(named["image_ids"]) == 2
    assert str(run / "nonfinite") in words
    checkpoint, trained = last(run), records(run, "train")
    assert all(torch.isfinite(t).all() for t in checkpoint.model.values())
    if policy == "stop":
        assert checkpoint.step == 2
        return
    assert [r["step"] for r in trained] == [1, 2, 3, 4, 5, 6]
    # A rollback from step 4 to step 2 takes two more batches than a skip does. A run resumed from
    # there must not read the offending images again.
    rolled_back = [(2, 4), (2, 8), (4, 12), (6, 16)]
    assert saved == ([(2, 4), (4, 8), (6, 12)] if policy == "skip" else rolled_back)
    kinds = [r["event"] for r in records(run, "event")]
    assert ("rolled_back" in kinds) == (policy == "rollback")
    assert (trained[3]["loss"] == -1) == (policy == "skip")


@pytest.mark.parametrize(
    ("name", "backbone"), [("ssd300-vgg16-coco", "vgg16"), ("nvidia-ssd300-coco", "resnet50")]
)
def test_the_dry_run_knows_the_network_of_a_detector_that_is_not_here(
    cli: Cli, shapes: Path, name: str, backbone: str
) -> None:
    plan = cli("train", "--data", shapes, "--init", name, "--dry-run").expect(0)
    assert backbone in plan.out


def test_a_training_process_imports_no_package_that_takes_seconds(tmp_path: Path) -> None:
    code = (
        "import atexit, json, sys\n"
        "atexit.register(lambda: print('\\n' + json.dumps(list(sys.modules))))\n"
        "from ssdctl.cli.main import main\n"
        "main(sys.argv[1:])"
    )
    command = train_command(Path("none"), tmp_path / "run", "--fake-data", "--steps", 2)
    out, words = start_script(code, *command).communicate()
    loaded = set(json.loads(out.splitlines()[-1]))
    assert "torch" in loaded
    assert (tmp_path / "run/checkpoints/last.pt").exists(), words
    assert not loaded & {"torchvision", "torch._dynamo", "torch._inductor", "sympy"}


def test_profile_contains_the_steps_from_first_to_last(tmp_path: Path, train: Train) -> None:
    run = tmp_path / "run"
    assert "profile of steps 2 to 3" in train("--steps", 4, "--profile", "2,3")
    events = json.loads((run / "profile/trace.json").read_text())["traceEvents"]
    names = [str(event.get("name")) for event in events]
    assert names.count("wait: next batch") == 2
    assert names.count("wait: device, at a log point") == 2
    assert sum("Optimizer.step#" in name for name in names) == 2
    table = (run / "profile/table.txt").read_text()
    assert "aten::convolution_backward" in table
    assert "wait: next batch" in table
