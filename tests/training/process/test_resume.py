"""Resume a run after changes around it: nothing is lost, mixed up or trained in vain."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN, Cli
from helpers import Train, assert_same_state, last, records

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.checkpoint.folder import CheckpointFolder
from ssdctl.checkpoint.third_party import to_third_party
from ssdctl.model.ssd300 import SSD300
from ssdctl.runs.run import Run


def steps(run: Path, kind: str = "train") -> list[int]:
    return [record["step"] for record in records(run, kind)]


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize("split", ["train", "val"])
def test_other_labels_of_the_next_start_are_named(
    tmp_path: Path, train: Train, shapes: Path, split: str
) -> None:
    data = tmp_path / "copy"
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    labels = data / f"annotations/instances_{split}2017.json"
    labels.write_text(labels.read_text().replace('"category_id":1,', '"category_id":2,'))
    said = train("--steps", 4, data=data)
    assert ("labels was" in said, "val_labels was" in said) == (True, split == "val")
    assert ("AP before and after" in said) == (split == "val")


def test_records_reach_the_disk_before_the_checkpoint_after_them(
    tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, missing = [0], list[tuple[str, int]]()
    fsync, rename = os.fsync, os.replace

    def spied_fsync(descriptor: int) -> None:
        fsync(descriptor)
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "metrics.jsonl":
            synced.append(len(records(tmp_path / "run", "train")))

    def spied_rename(source: Path, target: Path) -> None:
        number = re.search(r"step-(\d+)\.pt$", str(target))
        if number and synced[-1] < int(number[1]):
            missing.append((str(target), synced[-1]))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_rename)
    train("--steps", 4, "--save-every", "2st", "--keep", 5)
    assert len(synced) >= 3
    assert not missing


def test_images_without_objects_train_and_resume_bit_equal(tmp_path: Path, train: Train) -> None:
    options = ["--background", 0.4, "--bs", 4]
    words = train("--steps", 2, *options)
    assert "without objects" in words
    train("--steps", 5, *options)
    train("--steps", 5, *options, "--workers", 3, out=tmp_path / "straight")
    assert_same_state(last(tmp_path / "run"), last(tmp_path / "straight"))
    assert "background" in train("--steps", 8, "--background", 0, "--bs", 4, code=2)


def test_only_names_of_steps_are_checkpoints_of_a_run(run: Path) -> None:
    for name in ("step-100000000-good.pt", "step-.pt", "step-100000000.pt"):
        (run / "checkpoints" / name).touch()
    names = [p.name for p in CheckpointFolder(run, keep=1).steps()]
    assert names == ["step-00000003.pt", "step-100000000.pt"]


def test_no_intact_checkpoint_is_an_integrity_error(run: Path, train: Train) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        path.write_bytes(path.read_bytes()[:2000])
    before = (run / "metrics.jsonl").read_text()
    words = train("--steps", 5, code=5)
    assert "checkpoints" in words
    assert "--resume FILE" in words
    assert (run / "metrics.jsonl").read_text() == before


def test_a_resume_needs_no_first_weights_and_may_have_a_moved_dataset(
    run: Path, shapes: Path, tmp_path: Path, train: Train
) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(shapes)
    words = train("--steps", 4, "--backbone-weights", "/nowhere/resnet.pth", data=moved)
    assert {str(shapes), str(moved)} <= {word.strip(",;:.") for word in words.split()}
    assert steps(run) == [1, 2, 3, 4]


def test_what_must_not_be_continued_is_left_alone(run: Path, train: Train) -> None:
    """Another run with --resume never, a checkpoint of a newer version, or of other programs."""
    newest = run / "checkpoints/step-00000003.pt"
    torch.save(torch.load(newest, weights_only=True) | {"format": 2}, newest)
    peer = run.with_name("peer.pt")
    torch.save({"model": to_third_party(SSD300("tiny", 6, "none").state_dict(), "mlperf")}, peer)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert newest.name in train("--steps", 4, code=2)
    assert str(run) in train("--steps", 1, "--resume", "never", code=2)
    assert f"--init {peer}" in train("--steps", 1, "--resume", peer, code=2)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_dataset_of_other_classes_is_refused(run: Path, dataset: Path, train: Train) -> None:
    train_file, val_file = (
        dataset / f"annotations/instances_{s}2017.json" for s in ("train", "val")
    )
    originals = train_file.read_text(), val_file.read_text()
    for path, text in zip((train_file, val_file), originals, strict=True):
        path.write_text(text.replace('"ball"', '"globe"'))
    words = train("--steps", 4, data=dataset, code=5)
    assert "ball" in words
    assert "globe" in words
    assert "brick" not in words  # only the differences
    train_file.write_text(originals[0])  # now the splits differ
    assert str(dataset) in train("--steps", 4, data=dataset, code=3)
    val_file.write_text(originals[1])
    document = json.loads(originals[0])
    removed = document["images"].pop(0)["id"]
    document["annotations"] = [a for a in document["annotations"] if a["image_id"] != removed]
    train_file.write_text(json.dumps(document))
    assert re.search(r"had \d+ images, has \d+", train("--steps", 4, data=dataset, code=2))
    assert steps(run) == [1, 2, 3]


def test_another_global_batch_continues_elsewhere(run: Path, train: Train) -> None:
    train("--bs", 1, "--accumulate", 2, "--steps", 4)  # the same in other parts
    assert last(run).samples_seen == 8
    options, other = ["--steps", 4, "--accumulate", 2, "--resume-changed"], run.parent / "other"
    words = train(*options, code=2)
    assert "was 2, is 4" in words
    assert (steps(run), last(run).step) == ([1, 2, 3, 4], 4)
    resume = words.partition("--out FOLDER ")[2].partition(" continues")[0].split()
    train(*options, *resume[:2], out=other)
    assert (steps(other), last(other).samples_seen) == ([3, 4], 8 + 2 * 4)
    train("--steps", 1, out=run.parent / "third")  # a run that is not the file's
    assert "--resume" in train("--steps", 5, *resume[:2], out=run.parent / "third", code=2)


def test_changed_optimizer_settings_apply(run: Path, train: Train) -> None:
    words = train("--resume-changed", "--steps", 4, "--weight-decay", "0.25")
    assert "train.weight_decay was 0.0005, is 0.25" in words
    assert last(run).optimizer["param_groups"][0]["weight_decay"] == 0.25
    assert "warning" in train("--resume-changed", "--steps", 5, "--optimizer", "adamw").lower()
    train("--resume-changed", "--steps", 6, "--optimizer", "adamw", "--freeze-stem")


@pytest.mark.parametrize(
    "changed",
    [
        ["--backbone", "resnet34", "--resume-changed", "--bs", "3", "--fp32"],
        ["--lr", "0.1", "--decay-bias", "--bs", "1", "--seed", "5", "--tile", "0"],
        ["--limit-train", "5"],
        ["--config", "limit.toml"],
        ["--fake-data"],
    ],
)
def test_options_of_the_hint_continue_the_run(run: Path, train: Train, changed: list[str]) -> None:
    Path("limit.toml").write_text("[train]\nlimit_train = 5\n")
    words = train("--steps", 3, *changed, code=2)
    for name, difference in (
        ("--lr", "train.lr was 0.0025, is 0.1"),
        ("--seed", "train.seed was 0, is 5"),
        ("--fake-data", "train.fake_data was False, is True"),
        ("--config", "train.limit_train was None, is 5 (limit.toml:2)"),
    ):
        assert (difference in words) == (name in changed)
    options = words.partition("continue it with ")[2].partition(";")[0]
    options = options.replace("(no --limit-train)", "").split()
    assert ("--resume-changed" in words) == ("--backbone" not in changed)
    kept = [] if "--limit-train" in changed else changed
    train("--steps", 3, *(o for o in kept if o != "--resume-changed"), *options)
    assert steps(run) == [1, 2, 3]


def test_options_of_a_hint_keep_the_rules_choice(checkpoint: Path, shapes: Path, cli: Cli) -> None:
    """The rules for fine-tuning and for few images choose an optimizer and a decay as a whole."""
    words = ["train", "--data", shapes, *TINY_RUN.split()[2:]]
    assert cli(*words, "--steps", 2, "--out", "a", "--init", checkpoint).code == 0
    cli(*words, "--steps", 3, "--out", "a").expect(2, f"continue it with --init {checkpoint};")
    shutil.copy("a/checkpoints/last.pt", "moved.pt")
    words += ["--steps", 4, "--out", "b", "--resume", "moved.pt", "--decay-epochs", "9,99"]
    hint = cli(*words).err.partition("continue it with ")[2].partition(";")[0]
    assert {"--lr", "--decay-epochs"} <= {*hint.split()}
    assert cli(*words, *hint.split()).code == 0


def test_without_metrics_the_best_ap_is_the_checkpoints(run: Path, train: Train) -> None:
    (run / "metrics.jsonl").unlink()
    newest = run / "checkpoints/step-00000003.pt"
    torch.save({**torch.load(newest, weights_only=True), "best_ap": 0.9}, newest)
    train("--steps", 4)
    assert last(run).best_ap == 0.9
    assert load_checkpoint(run / "checkpoints/best.pt").step == 3  # the new AP is worse


def test_a_run_does_not_continue_from_the_first_weights_of_another(
    run: Path, train: Train, tmp_path: Path
) -> None:
    one, other = (shutil.copy(run / "checkpoints/last.pt", tmp_path / n) for n in ("a.pt", "b.pt"))
    tuned = tmp_path / "tuned"
    train("--steps", 2, "--init", one, out=tuned)
    for force in ([], ["--resume-changed"]):
        assert f"--init {one}" in train("--steps", 4, "--init", other, *force, out=tuned, code=2)
    same = os.path.relpath(one)
    train("--steps", 4, "--init", same, out=tuned)
    Path(one).unlink()  # whether it is the same file is not known
    assert "not read" in train("--steps", 5, "--init", other, out=tuned)
    assert steps(tuned) == [1, 2, 3, 4, 5]
    assert Run(tuned).settings["train.init"] == str(one)
