"""Resume a run after changes around it: nothing is lost, mixed up or trained in vain."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN, Result

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.checkpoint.folder import CheckpointFolder, save_checkpoint
from ssdctl.checkpoint.third_party import to_third_party
from ssdctl.config import PrepareConfig
from ssdctl.data.prepare import prepare
from ssdctl.model.ssd300 import SSD300
from ssdctl.training import resume

Cli = Callable[..., Result]
OPTIONS = TINY_RUN.split()


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of the tiny run (three steps of two images) that a test may resume."""
    folder = tmp_path / "run"
    shutil.copytree(tiny_run, folder)
    return folder


def steps(run: Path, kind: str = "train") -> list[int]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [r["step"] for r in map(json.loads, lines) if r["kind"] == kind]


def test_resuming_from_an_earlier_step_retires_later_checkpoints(
    run: Path, shapes: Path, cli: Cli
) -> None:
    train = ["train", "--data", shapes, "--out", run, *OPTIONS, "--save-every", "1st", "--keep", 9]
    assert cli(*train, "--steps", 6).code == 0
    earlier = run / "checkpoints/step-00000004.pt"
    result = cli(*train, "--steps", 5, "--resume", earlier)
    assert result.code == 0, result.err
    names = sorted(p.name for p in (run / "checkpoints").glob("step-*"))
    assert names[-3:] == [
        "step-00000005.pt",
        "step-00000005.pt.retired",
        "step-00000006.pt.retired",
    ]
    assert load_checkpoint(run / "checkpoints/last.pt").step == 5
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


def test_no_intact_checkpoint_is_an_integrity_error(run: Path, shapes: Path, cli: Cli) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        path.write_bytes(path.read_bytes()[:2000])
    before = (run / "metrics.jsonl").read_text()
    result = cli("train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 5)
    assert result.code == 5
    assert "checkpoints" in result.err
    assert "--resume FILE" in result.err
    assert (run / "metrics.jsonl").read_text() == before


def test_a_resume_needs_no_first_weights(run: Path, shapes: Path, cli: Cli) -> None:
    """The backbone's weights were moved or deleted before a run is resumed."""
    options = [o for o in OPTIONS if o not in ("--backbone-weights", "none")]
    train = ["train", "--data", shapes, "--out", run, *options, "--steps", 4]
    result = cli(*train, "--backbone-weights", "/nowhere/resnet.pth")
    assert result.code == 0, result.err
    assert steps(run) == [1, 2, 3, 4]


def test_never_resuming_mixes_no_new_run_into_an_old_one(run: Path, shapes: Path, cli: Cli) -> None:
    train = ["train", "--data", shapes, *OPTIONS, "--steps", 1, "--resume", "never"]
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    result = cli(*train, "--out", run)
    assert result.code == 2
    assert str(run) in result.err
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file()} == before


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    run: Path, shapes: Path, cli: Cli
) -> None:
    good = run / "checkpoints/step-00000003.pt"
    (run / "checkpoints/step-00000009.pt").write_bytes(good.read_bytes()[:-1000])
    for folder in (run, run / "checkpoints"):  # of a writer that was killed
        (folder / ".file.0123456789ab.999999999.tmp").touch()
    result = cli("train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 4)
    assert result.code == 0, result.err
    assert not list(run.rglob("*.tmp"))
    assert "step-00000009.pt" in " ".join(result.err.split())
    assert (run / "checkpoints/step-00000009.pt.retired").is_file()
    assert steps(run) == [1, 2, 3, 4]


def test_a_third_party_checkpoint_cannot_be_resumed(shapes: Path, cli: Cli, tmp_path: Path) -> None:
    peer = tmp_path / "peer.pt"
    torch.save({"model": to_third_party(SSD300("tiny", 6, "none").state_dict(), "mlperf")}, peer)
    train = ["train", "--data", shapes, "--out", tmp_path / "new", *OPTIONS, "--steps", 1]
    result = cli(*train, "--resume", peer)
    assert result.code == 2
    assert str(peer) in " ".join(result.err.split())
    assert f"--init {peer}" in " ".join(result.err.split())


def test_a_dataset_of_other_classes_or_another_size_is_refused(
    run: Path, dataset: Path, cli: Cli
) -> None:
    train = ["train", "--data", dataset, "--out", run, *OPTIONS, "--steps", 4]
    for path in dataset.glob("annotations/*.json"):
        path.write_text(path.read_text().replace('"ball"', '"globe"'))
    result = cli(*train)
    assert result.code == 5
    assert "missing: ball; not in the checkpoint: globe" in " ".join(result.err.split())
    assert "brick" not in result.err  # only the differences
    for path in dataset.glob("annotations/*.json"):
        document = json.loads(path.read_text().replace('"globe"', '"ball"'))
        removed = document["images"].pop(0)["id"]
        document["annotations"] = [a for a in document["annotations"] if a["image_id"] != removed]
        path.write_text(json.dumps(document))
    result = cli(*train)
    assert result.code == 2
    assert re.search(r"the dataset had \d+ images, has \d+", result.err)
    assert steps(run) == [1, 2, 3]


def test_another_global_batch_is_refused_or_counted_again(
    run: Path, shapes: Path, cli: Cli
) -> None:
    train = ["train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 3, "--accumulate", 2]
    result = cli(*train)
    assert result.code == 2
    assert "the global batch was 2, is 4" in result.err
    assert cli(*train, "--resume-changed").code == 0
    # Six samples were seen: one step of four, rounded down; then two more steps.
    assert load_checkpoint(run / "checkpoints/last.pt").samples_seen == 6 + 2 * 4


def test_resumes_with_the_same_global_batch_in_other_parts(
    run: Path, shapes: Path, cli: Cli
) -> None:
    options = [*OPTIONS, "--bs", 1, "--accumulate", 2]
    result = cli("train", "--data", shapes, "--out", run, *options, "--steps", 4)
    assert result.code == 0, result.err
    assert load_checkpoint(run / "checkpoints/last.pt").samples_seen == 8


def test_changed_optimizer_settings_apply(run: Path, shapes: Path, cli: Cli) -> None:
    train = ["train", "--data", shapes, "--out", run, *OPTIONS, "--resume-changed"]
    assert cli(*train, "--steps", 4, "--weight-decay", "0.25").code == 0
    groups = load_checkpoint(run / "checkpoints/last.pt").optimizer["param_groups"]
    assert groups[0]["weight_decay"] == 0.25
    result = cli(*train, "--steps", 5, "--optimizer", "adamw")
    assert result.code == 0, result.err
    assert "momentum is reset" in result.err
    assert cli(*train, "--steps", 6, "--optimizer", "adamw", "--freeze-stem").code == 0


def test_an_evaluation_that_a_stop_prevented_is_made_up(run: Path, shapes: Path, cli: Cli) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["kind"] == "train"]
    (run / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    train = ["train", "--data", shapes, "--out", run, *OPTIONS, "--eval-every", "3st"]
    assert cli(*train, "--steps", 4).code == 0
    assert steps(run, "eval") == [3, 4]
    assert cli(*train, "--steps", 4).code == 0
    assert steps(run, "eval") == [3, 4]


def test_a_run_that_died_before_it_marked_its_best_marks_it_in_the_next_start(
    shapes: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    train = ["train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 1]

    def dies(*_: object) -> None:
        raise SystemExit(9)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointFolder, "mark_best", dies)
        assert cli(*train).code == 9
    assert not (run / "checkpoints/best.pt").exists()
    result = cli(*train)
    assert result.code == 0, result.err
    assert load_checkpoint(run / "checkpoints/best.pt").step == 1
    assert steps(run, "eval") == [1]
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "best.pt", "last.pt", "step-00000001.pt",
    ]  # fmt: skip


def test_without_metrics_the_best_ap_is_the_checkpoints(run: Path, shapes: Path, cli: Cli) -> None:
    (run / "metrics.jsonl").unlink()
    newest = run / "checkpoints/step-00000003.pt"
    payload = torch.load(newest, weights_only=True)
    save_checkpoint(newest, {**payload, "best_ap": 0.9})
    result = cli("train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 4)
    assert result.code == 0, result.err
    assert load_checkpoint(run / "checkpoints/last.pt").best_ap == 0.9
    assert load_checkpoint(run / "checkpoints/best.pt").step == 3  # the new AP is worse


def test_splits_of_other_classes_are_refused_before_training(dataset: Path, cli: Cli) -> None:
    path = dataset / "annotations/instances_val2017.json"
    document = json.loads(path.read_text())
    document["categories"].reverse()
    path.write_text(json.dumps(document))
    result = cli("train", "--data", dataset, "--out", "run", *OPTIONS, "--steps", 1)
    assert result.code == 3
    assert "different categories" in result.err


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
    tiny_run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_run / "checkpoints/last.pt"
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


def test_a_checkpoint_records_batch_and_precision(tiny_run: Path) -> None:
    payload = torch.load(tiny_run / "checkpoints/last.pt", weights_only=True)
    assert payload["global_batch"] == 2
    assert payload["config"]["train.precision"] == "fp32"


@pytest.mark.parametrize(
    "changed",
    [
        ["--backbone", "resnet34", "--extra-norm", "none"],
        ["--backbone", "resnet34", "--resume-changed", "--bs", "3", "--fp32"],
        ["--lr", "0.1", "--decay-bias", "--bs", "1"],
        ["--limit-train", "5"],
    ],
)
def test_options_of_the_hint_continue_the_run(
    run: Path, shapes: Path, cli: Cli, changed: list[str]
) -> None:
    train = ["train", "--data", shapes, "--out", run, "--steps", 3, *OPTIONS]
    refused = cli(*train, *changed)
    assert refused.code == 2
    hint = " ".join(refused.err.split()).partition("continue it with ")[2]
    options = hint.partition(";")[0].replace("(no --limit-train)", "").split()
    assert ("--resume-changed" in hint) == ("--backbone" not in changed)
    kept = [] if "--limit-train" in changed else changed
    result = cli(*train, *(o for o in kept if o != "--resume-changed"), *options)
    assert result.code == 0, result.err
    assert steps(run) == [1, 2, 3]


@pytest.mark.parametrize(("earlier", "code"), [({}, 0), ({"train.hue_degrees": 5.0}, 2)])
def test_a_setting_that_the_checkpoints_version_lacked(
    run: Path,
    shapes: Path,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
    earlier: dict[str, float],
    code: int,
) -> None:
    """It counts as unchanged, unless what that version did is known and differs."""
    for path in (run / "checkpoints").iterdir():
        content = torch.load(path, weights_only=True)
        content["config"].pop("train.hue_degrees", None)
        torch.save(content, path)
    monkeypatch.setattr(resume, "EARLIER_VALUES", earlier)
    result = cli("train", "--data", shapes, "--out", run, *OPTIONS, "--steps", 4)
    assert result.code == code, result.err
    assert ("train.hue_degrees" in result.err) == bool(earlier)
