"""Resume a run after changes around it: nothing is lost, mixed up or trained in vain."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from conftest import Cli
from helpers import last, records

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.checkpoint.folder import CheckpointFolder, save_checkpoint
from ssdctl.checkpoint.third_party import to_third_party
from ssdctl.config import PrepareConfig
from ssdctl.data.prepare import prepare
from ssdctl.model.ssd300 import SSD300

if TYPE_CHECKING:
    from training.process.conftest import Train


def steps(run: Path, kind: str = "train") -> list[int]:
    return [record["step"] for record in records(run, kind)]


def test_resuming_from_an_earlier_step_retires_later_checkpoints(run: Path, train: Train) -> None:
    often = ["--save-every", "1st", "--keep", 9]
    train(*often, "--steps", 6)
    train(*often, "--steps", 5, "--resume", run / "checkpoints/step-00000004.pt")
    names = sorted(p.name for p in (run / "checkpoints").glob("step-*"))
    assert names[-3:] == [
        "step-00000005.pt",
        "step-00000005.pt.retired",
        "step-00000006.pt.retired",
    ]
    assert last(run).step == 5
    assert steps(run) == [1, 2, 3, 4, 5]


def test_later_checkpoints_are_used_until_the_next_save(run: Path) -> None:
    """A process that continues from an earlier step and dies before it saves loses nothing."""
    checkpoints = CheckpointFolder(run, keep=1)
    (later,) = checkpoints.continue_from(1)
    assert checkpoints.newest_intact() == (None, [])
    restarted, _ = CheckpointFolder(run, keep=1).newest_intact()
    assert restarted is not None
    assert restarted.path == later


def test_only_numbered_checkpoints_are_the_runs_own(tmp_path: Path) -> None:
    names = ["step-99999999.pt", "step-100000000.pt"]
    (tmp_path / "checkpoints").mkdir()
    for name in [*names, "step-100000000-good.pt", "step-.pt", "best.pt"]:
        (tmp_path / "checkpoints" / name).touch()
    assert [path.name for path in CheckpointFolder(tmp_path, keep=3).steps()] == names


def test_no_intact_checkpoint_is_an_integrity_error(run: Path, train: Train) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        path.write_bytes(path.read_bytes()[:2000])
    before = (run / "metrics.jsonl").read_text()
    words = train("--steps", 5, code=5)
    assert "checkpoints" in words
    assert "--resume FILE" in words
    assert (run / "metrics.jsonl").read_text() == before


def test_a_resume_needs_no_first_weights(run: Path, train: Train) -> None:
    """The backbone's weights were moved or deleted before a run is resumed."""
    train("--steps", 4, "--backbone-weights", "/nowhere/resnet.pth")
    assert steps(run) == [1, 2, 3, 4]


def test_never_resuming_mixes_no_new_run_into_an_old_one(run: Path, train: Train) -> None:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert str(run) in train("--steps", 1, "--resume", "never", code=2)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(run: Path, train: Train) -> None:
    good = run / "checkpoints/step-00000003.pt"
    (run / "checkpoints/step-00000009.pt").write_bytes(good.read_bytes()[:-1000])
    for folder in (run, run / "checkpoints"):  # of a writer that was killed
        (folder / ".file.0123456789ab.999999999.tmp").touch()
    assert "step-00000009.pt" in train("--steps", 4)
    assert not list(run.rglob("*.tmp"))
    assert (run / "checkpoints/step-00000009.pt.retired").is_file()
    assert steps(run) == [1, 2, 3, 4]


def test_a_third_party_checkpoint_cannot_be_resumed(train: Train, tmp_path: Path) -> None:
    peer = tmp_path / "peer.pt"
    torch.save({"model": to_third_party(SSD300("tiny", 6, "none").state_dict(), "mlperf")}, peer)
    assert f"--init {peer}" in train("--steps", 1, "--resume", peer, code=2)


def test_a_dataset_of_other_classes_or_another_size_is_refused(
    run: Path, dataset: Path, train: Train
) -> None:
    for path in dataset.glob("annotations/*.json"):
        path.write_text(path.read_text().replace('"ball"', '"globe"'))
    words = train("--steps", 4, data=dataset, code=5)
    assert "ball" in words
    assert "globe" in words
    assert "brick" not in words  # only the differences
    for path in dataset.glob("annotations/*.json"):
        document = json.loads(path.read_text().replace('"globe"', '"ball"'))
        removed = document["images"].pop(0)["id"]
        document["annotations"] = [a for a in document["annotations"] if a["image_id"] != removed]
        path.write_text(json.dumps(document))
    assert re.search(r"had \d+ images, has \d+", train("--steps", 4, data=dataset, code=2))
    assert steps(run) == [1, 2, 3]


def test_another_global_batch_is_refused_or_counted_again(run: Path, train: Train) -> None:
    options = ["--steps", 3, "--accumulate", 2]
    assert "was 2, is 4" in train(*options, code=2)
    train(*options, "--resume-changed")
    # Six samples were seen: one step of four, rounded down; then two more steps.
    assert last(run).samples_seen == 6 + 2 * 4


def test_resumes_with_the_same_global_batch_in_other_parts(run: Path, train: Train) -> None:
    train("--bs", 1, "--accumulate", 2, "--steps", 4)
    assert last(run).samples_seen == 8


def test_changed_optimizer_settings_apply(run: Path, train: Train) -> None:
    train("--resume-changed", "--steps", 4, "--weight-decay", "0.25")
    assert last(run).optimizer["param_groups"][0]["weight_decay"] == 0.25
    assert "warning" in train("--resume-changed", "--steps", 5, "--optimizer", "adamw").lower()
    train("--resume-changed", "--steps", 6, "--optimizer", "adamw", "--freeze-stem")


def test_an_evaluation_that_a_stop_prevented_is_made_up(run: Path, train: Train) -> None:
    kept = [json.dumps(record) for record in records(run, "train")]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    for _ in range(2):
        train("--eval-every", "3st", "--steps", 4)
        assert steps(run, "eval") == [3, 4]


def test_a_run_that_died_before_it_marked_its_best_marks_it_in_the_next_start(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def dies(*_: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "mark_best", dies)
        train("--steps", 1, code=9)
    assert not (run / "checkpoints/best.pt").exists()
    train("--steps", 1)
    assert load_checkpoint(run / "checkpoints/best.pt").step == 1
    assert steps(run, "eval") == [1]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "best.pt", "last.pt", "step-00000001.pt",
    ]  # fmt: skip


def test_without_metrics_the_best_ap_is_the_checkpoints(run: Path, train: Train) -> None:
    (run / "metrics.jsonl").unlink()
    newest = run / "checkpoints/step-00000003.pt"
    save_checkpoint(newest, {**torch.load(newest, weights_only=True), "best_ap": 0.9})
    train("--steps", 4)
    assert last(run).best_ap == 0.9
    assert load_checkpoint(run / "checkpoints/best.pt").step == 3  # the new AP is worse


def test_splits_of_other_classes_are_refused_before_training(dataset: Path, train: Train) -> None:
    path = dataset / "annotations/instances_val2017.json"
    document = json.loads(path.read_text())
    document["categories"].reverse()
    path.write_text(json.dumps(document))
    assert str(dataset) in train("--steps", 1, data=dataset, code=3)


def test_a_validation_image_that_does_not_open_counts_without_detections(
    tiny_run: Path, dataset: Path, cli: Cli
) -> None:
    (dataset / "val2017/000000000002.jpg").write_bytes(b"spoiled")
    prepare(dataset, dataset / "prepared", PrepareConfig(pack=False, allow_dropped=True))
    options = ["--data", dataset, "--device", "cpu", "--score-threshold", 0.01, "--json"]
    result = cli(
        "evaluate", tiny_run / "checkpoints/last.pt", *options, "--detections", "found.json"
    )
    assert result.code == 0, result.err
    assert "1 images cannot be decoded" in result.err
    assert json.loads(result.out)["images"] == 9
    image_ids = {d["image_id"] for d in json.loads(Path("found.json").read_text())}
    assert 2 not in image_ids
    assert image_ids


def test_weights_of_another_backbone_are_refused_at_once(cli: Cli) -> None:
    result = cli("train", "--preset", "mlperf-r34", "--backbone", "resnet50", "--data", "none")
    assert result.code == 2
    assert all(word in result.err for word in ("model.weights", "resnet34-333f7ec4", "resnet50"))


def test_data_of_an_option_or_a_variable_beat_the_checkpoints_and_those_of_a_file_do_not(
    checkpoint: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("ssdctl.toml").write_text('[data]\nroot = "elsewhere"\n')
    result = cli("evaluate", checkpoint, "--device", "cpu", "--json")
    assert result.code == 0, result.err
    for given in (["--set", "data.root=nowhere"], []):
        if not given:
            monkeypatch.setenv("SSDCTL_DATA__ROOT", "nowhere")
        result = cli("evaluate", checkpoint, "--device", "cpu", *given)
        assert result.code == 3
        assert "nowhere" in result.err


def test_a_broken_local_config_does_not_prevent_checks_of_others(cli: Cli) -> None:
    Path("ssdctl.toml").write_text("[train]\nlrr = 1\n")
    Path("good.toml").write_text("[train]\nlr = 1\n")
    assert cli("config", "validate", "good.toml").code == 0
    result = cli("config", "validate")
    assert result.code == 2
    assert "train.lrr" in result.err
    assert cli("config", "init", "--force").code == 0
    assert cli("config", "validate").code == 0


@pytest.mark.parametrize(
    "changed",
    [
        ["--backbone", "resnet34", "--extra-norm", "none"],
        ["--backbone", "resnet34", "--resume-changed", "--bs", "3", "--fp32"],
        ["--lr", "0.1", "--decay-bias", "--bs", "1"],
        ["--limit-train", "5"],
    ],
)
def test_options_of_the_hint_continue_the_run(run: Path, train: Train, changed: list[str]) -> None:
    hint = train("--steps", 3, *changed, code=2).partition("continue it with ")[2]
    options = hint.partition(";")[0].replace("(no --limit-train)", "").split()
    assert ("--resume-changed" in hint) == ("--backbone" not in changed)
    kept = [] if "--limit-train" in changed else changed
    train("--steps", 3, *(o for o in kept if o != "--resume-changed"), *options)
    assert steps(run) == [1, 2, 3]


def test_a_setting_of_the_recipe_that_the_checkpoints_version_lacked(
    run: Path, train: Train
) -> None:
    """It counts as unchanged: what that version did is not known."""
    for path in (run / "checkpoints").iterdir():
        content = torch.load(path, weights_only=True)
        content["config"].pop("train.hue_degrees", None)
        torch.save(content, path)
    assert "hue_degrees" not in train("--steps", 4)
