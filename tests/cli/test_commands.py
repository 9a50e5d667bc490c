"""Every command: its help, its typical mistakes, its results on stdout."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Result

Cli = Callable[..., Result]


def process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ssdctl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)  # type: ignore[call-overload]


def test_light_commands_do_not_import_torch(shapes: Path, tmp_path: Path) -> None:
    results = tmp_path / "detections.json"
    results.write_text("[]")
    commands = [
        (["--help"], 0),
        (["train", "--help"], 0),
        (["train", "-h"], 0),
        (["--version"], 0),
        (["train", "--data", str(shapes), "--dry-run"], 0),
        (["config", "show"], 0),
        (["evaluate", str(results), "--data", str(shapes)], 0),
        (["launch", "--hpus", "8", "--dry-run"], 0),
        (["export", str(tmp_path / "absent.pt"), "--format", "onnx", "--out", "ssd.onnx"], 2),
    ]
    code = (
        "import json, sys; from ssdctl.cli.main import main\n"
        "for command, expected in json.loads(sys.argv[1]):\n"
        "    try: main(command)\n"
        "    except SystemExit as e: code = e.code\n"
        "    assert (code or 0) == expected, (command, code)\n"
        "    assert 'torch' not in sys.modules and 'torchvision' not in sys.modules, command"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["train", "evaluate", "prepare", "predict", "launch"])
def test_unknown_option_is_a_usage_error(cli: Cli, command: str) -> None:
    result = cli(command, "--flux-capacitor")
    assert result.code == 2
    assert "--flux-capacitor" in result.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["train", "--data", "none", "--device", "cpu"], 3, "no such dataset folder"),
        (["train", "--data", ".", "--device", "cpu"], 3, "no dataset found"),
        (["train", "--set", "train.lrr=1"], 2, "did you mean 'train.lr'?"),
        (["train", "--set", "nonsense"], 2, "KEY=VALUE"),
        (["train", "--lr", "fast"], 2, "--lr: 'fast'"),
        (["train", "--config", "none.toml"], 2, "no such config file"),
        (["train", "--fake-data", "--device", "hpu"], 2, "habana_frameworks"),
        (["train", "--fake-data", "--device", "xla"], 2, "xla"),
        (["evaluate", "none.pt"], 2, "no such file"),
        (["evaluate", "text.pt"], 5, "not a checkpoint"),
        (["evaluate", "text.json", "--data", "."], 3, "no dataset found"),
        (["predict", "text.pt", "text.pt"], 5, "not a checkpoint"),
        (["predict", "none.pt", "none.jpg"], 2, "none.pt"),
        (["prepare", "--data", "none"], 3, "no such dataset folder"),
        (["report", "."], 2, "run folder"),
        (["export", "text.pt", "--format", "mlperf", "--out", "x"], 5, "not a checkpoint"),
        (["export", "text.pt", "--format", "zip", "--out", "x"], 2, "mlperf"),
        (["config", "validate", "none.toml"], 2, "no such config file"),
    ],
)
@pytest.mark.process
def test_mistakes_get_one_message_and_their_code(
    cli: Cli, arguments: list[str], code: int, words: str
) -> None:
    Path("text.pt").write_text("hello")
    Path("text.json").write_text("[]")
    result = cli(*arguments)
    assert result.code == code, result.err
    assert words in result.err
    assert "Traceback" not in result.err
    assert result.out == ""


def test_an_unexpected_exception_is_a_bug(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(**_: object) -> None:
        raise ValueError("out of the blue")

    monkeypatch.setattr("ssdctl.cli.command.resolve", breaks)
    result = cli("config", "show", "--json")
    assert result.code == 1
    assert "ValueError: out of the blue" in result.err
    assert "This is a bug in ssdctl" in result.err
    assert result.out == ""


def test_verbose_shows_the_traceback(cli: Cli) -> None:
    assert "Traceback" in cli("evaluate", "none.pt", "-v").err


@pytest.mark.process
def test_no_permission_is_a_disk_error(cli: Cli, shapes: Path) -> None:
    """Not even root can create folders in /proc."""
    for arguments in (
        ["prepare", "--data", shapes, "--store", "/proc/store"],
        ["download", "--dataset", "shapes", "--dest", "/proc/shapes", "--images", "1"],
        ["config", "init", "/proc/ssdctl.toml"],
    ):
        result = cli(*arguments)
        assert result.code == 6, (arguments, result.err)
        assert "/proc" in result.err
        assert "Traceback" not in result.err


@pytest.mark.process
def test_plan_as_json(cli: Cli, shapes: Path) -> None:
    result = cli("train", "--data", shapes, "--bs", 4, "--epochs", 10, "--dry-run", "--json")
    plan = json.loads(result.out)
    assert set(plan) == {
        "images", "global_batch_size", "steps_per_epoch", "total_steps", "warmup_steps", "peak_lr",
        "decay_steps", "recipe", "workers", "cpu_quota",
    }  # fmt: skip
    assert plan["global_batch_size"] == 4
    assert plan["total_steps"] == 10 * plan["images"] // 4
    assert not Path("runs").exists()


def test_only_a_plan_without_data_assumes_coco(cli: Cli) -> None:
    result = cli("train", "--dry-run", "--json", "--bs", 32)
    assert result.code == 0, result.err
    plan = json.loads(result.out)
    assert (plan["images"], plan["steps_per_epoch"]) == (117_266, 3664)
    assert "117,266" in result.err
    wrong = cli("train", "--dry-run", "--data", "none")
    assert (wrong.code, wrong.out) == (3, "")
    assert "none" in wrong.err
    assert cli("train", "--dry-run", "--fake-data", "--data", "none").code == 0


def test_a_plan_shows_what_a_run_starts_with(cli: Cli, shapes: Path) -> None:
    plan = cli("train", "--data", shapes, "--init", "x.pt", "--bs", 4, "--dry-run", "--lr", 1e-3)
    assert plan.code == 2
    plan = cli("train", "--data", shapes, "--bs", 4, "--dry-run", "--lr", 1e-3, "--device", "cpu")
    for word in ("cpu", "ball", "ring", "resnet34", "0.001", "0.000125"):
        assert word in plan.out


@pytest.mark.parametrize(
    ("options", "is_told"),
    [
        (["--steps", 20], False),  # the small-data rule fits its schedule to it
        (["--steps", 20, "--preset", "stable-r34"], True),
        (["--steps", 20, "--lr-decay", "cosine", "--decay-epochs", "1,65"], True),
        (["--preset", "stable-r34"], False),
        (["--steps", 20, "--fake-data", "--preset", "stable-r34"], False),
    ],
)
def test_a_plan_tells_what_steps_do_not_reach(
    cli: Cli, shapes: Path, options: list[object], is_told: bool
) -> None:
    result = cli("train", "--data", shapes, "--dry-run", *options)
    assert result.code == 0, result.err
    assert ("--steps 20" in result.err) == is_told


@pytest.mark.parametrize(
    "options",
    [
        ["--init", "absent.pt"],
        ["--init", "hf://absent"],
        ["--init", "."],
        ["--backbone-weights", "absent.pth"],
        ["--resume", "absent.pt"],
    ],
    ids=" ".join,
)
def test_a_plan_refuses_missing_weights_like_the_run(cli: Cli, options: list[str]) -> None:
    for is_planned in (True, False):
        train = ["train", "--fake-data", "--device", "cpu", "--out", "run", *options]
        result = cli(*train, *["--dry-run"] * is_planned)
        assert result.code == 2, (is_planned, result.err)
        assert options[1] in result.err


@pytest.mark.parametrize(("batch", "is_reported"), [(20, False), (1000, True)])
def test_plan_reports_a_batch_larger_than_the_dataset(
    cli: Cli, shapes: Path, batch: int, is_reported: bool
) -> None:
    options = ["--data", shapes, "--bs", batch, "--steps", 1, "--warmup", "0st"]
    result = cli("train", *options, "--dry-run")
    assert result.code == 0, result.err
    assert ("more than there are images" in result.out) == is_reported


@pytest.mark.process
def test_config_commands(cli: Cli) -> None:
    assert cli("config", "init").code == 0
    assert cli("config", "init").code == 2
    assert "valid" in cli("config", "validate").out
    text = Path("ssdctl.toml").read_text()
    Path("ssdctl.toml").write_text(text.replace("#lr = 0.0025", "lr = 0.5"))
    settings = json.loads(cli("config", "show", "--json").out)
    assert settings["train.lr"]["value"] == 0.5
    assert re.fullmatch(r"ssdctl\.toml:\d+", settings["train.lr"]["source"])
    assert list(json.loads(cli("config", "show", "--json", "train.lr").out)) == ["train.lr"]
    assert "Time limit" in cli("config", "show", "slurm").out
    assert "did you mean 'slurm'?" in cli("config", "show", "slrum").err
    assert json.loads(cli("config", "schema").out)["$defs"]
    assert set(json.loads(cli("config", "presets", "--json").out)) == {
        "mlperf-r34", "nvidia-r50", "habana-tf-r34", "stable-r34", "dali-r34",
        "torchvision-vgg16",
    }  # fmt: skip
    assert "mlperf-r34" in cli("config", "presets").out


def test_evaluate_uses_the_dataset_of_the_checkpoint(
    cli: Cli, tiny_run: Path, tmp_path: Path
) -> None:
    checkpoint = tiny_run / "checkpoints/last.pt"
    written = tmp_path / "detections.json"
    low = ["--score-threshold", "0.01", "--device", "cpu"]
    result = cli("evaluate", checkpoint, "--json", "--verify", "--detections", written, *low)
    assert result.code == 0, result.err
    figures = json.loads(result.out)
    assert figures["images"] == 9
    assert figures["step"] == 3
    root = re.search(r'root = "(.*)"', (tiny_run / "config.toml").read_text())
    assert root is not None
    again = cli("evaluate", written, "--data", root[1], "--json")
    assert again.code == 0, again.err
    assert json.loads(again.out)["AP"] == figures["AP"]
    assert json.loads(again.out)["detections"] == figures["detections"]
    twice = cli("evaluate", written, "--data", root[1], "--detections", "copy.json")
    assert (twice.code, Path("copy.json").exists()) == (2, False)
    assert "--detections" in twice.err
    assert cli("evaluate", checkpoint, "--detections", ".", *low).code == 2
    refused = cli("evaluate", checkpoint, "--report", written, *low)
    assert (refused.code, refused.out) == (6, "")
    human = cli("evaluate", checkpoint, "--limit", 3, *low)
    assert "ring" in human.out
    assert "Missed" in human.out  # what the errors cost


def test_images_without_objects_have_no_ap(cli: Cli, shapes: Path) -> None:
    name = "annotations/instances_val2017.json"
    document = json.loads((shapes / name).read_text())
    Path("data/annotations").mkdir(parents=True)
    Path("data/val2017").symlink_to(shapes / "val2017")
    Path("data", name).write_text(json.dumps({**document, "annotations": []}))
    Path("none.json").write_text("[]")
    result = cli("evaluate", "none.json", "--data", "data", "--json")
    assert (result.code, json.loads(result.out)["AP"]) == (0, -1)
    assert "no annotated objects" in result.err
    assert "AP is 0" not in result.err


def test_a_moved_dataset_is_reported(
    cli: Cli, checkpoint: Path, shapes: Path, tmp_path: Path
) -> None:
    import torch

    payload = torch.load(checkpoint, weights_only=True)
    payload["config"]["data.root"] = "/nowhere/coco"
    torch.save(payload, "moved.pt")
    Path("data").mkdir()
    Path("data/coco").symlink_to(shapes)
    result = cli("evaluate", "moved.pt", "--json", "--device", "cpu", "--limit", 2)
    assert result.code == 0, result.err
    assert "/nowhere/coco" in result.err
    assert "using data/coco" in result.err


def test_unknown_categories_are_reported(cli: Cli, shapes: Path) -> None:
    Path("d.json").write_text(
        '[{"image_id": 1, "category_id": 99, "bbox": [1, 1, 9, 9], "score": 0.5}]'
    )
    result = cli("evaluate", "d.json", "--data", shapes, "--json", "-q")
    assert result.code == 0, result.err
    assert json.loads(result.out)["AP"] == 0
    assert result.err.startswith("warning: 1 detections are of categories that")


def test_scored_images_can_be_selected(
    cli: Cli, checkpoint: Path, shapes: Path, tmp_path: Path
) -> None:
    root = tmp_path / "dataset"
    shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
    path = root / "annotations/instances_val2017.json"
    document = json.loads(path.read_text())
    first, second = (image["id"] for image in document["images"][:2])
    kept = [a for a in document["annotations"] if a["image_id"] not in (first, second)]
    path.write_text(json.dumps({**document, "annotations": kept}))
    Path("d.json").write_text("[]")
    for what in (["d.json"], [checkpoint, "--device", "cpu"]):
        counted = []
        for more in ([], ["--annotated-only"], ["--annotated-only", "--limit", 3]):
            result = cli("evaluate", *what, "--data", root, "--json", *more)
            assert result.code == 0, result.err
            counted.append(json.loads(result.out)["images"])
        assert counted == [9, 7, 3]
    assert "2 without objects skipped" in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"images": [{"id": 1}, {"id": 1}]}, "duplicate image ids: 1"),
        (
            {"annotations": [{"id": 5, "image_id": 9, "category_id": 2}]},
            "does not list: 5 (image 9)",
        ),
        (
            {"annotations": [{"id": 5, "image_id": 1, "category_id": 3}]},
            "does not list: 5 (category 3)",
        ),
    ],
)
def test_annotations_without_objects_are_an_error(
    cli: Cli, change: dict[str, object], words: str
) -> None:
    sound = {"images": [{"id": 1}], "annotations": [], "categories": [{"id": 2, "name": "cat"}]}
    Path("annotations").mkdir()
    Path("annotations/instances_val2017.json").write_text(json.dumps({**sound, **change}))
    Path("d.json").write_text("[]")
    result = cli("evaluate", "d.json", "--data", ".")
    assert result.code == 3
    assert words in " ".join(result.err.split())
    assert result.out == ""


def test_evaluate_a_run_folder(cli: Cli, tiny_run: Path) -> None:
    """The best checkpoint, or every one with --all."""
    shutil.copytree(tiny_run, "run")
    checkpoints = Path("run/checkpoints")
    (checkpoints / "best.pt").unlink()  # a copy is not a link: another checkpoint
    shutil.copy(checkpoints / "step-00000003.pt", checkpoints / "step-00000002.pt")
    shutil.copy(checkpoints / "step-00000003.pt", checkpoints / "best.pt")
    options = ("--device", "cpu", "--limit", 2)
    best = json.loads(cli("evaluate", "run", "--json", *options).out)
    assert (best["checkpoint"], best["images"]) == ("run/checkpoints/best.pt", 2)
    entries = json.loads(cli("evaluate", "run", "--all", "--json", *options).out)["checkpoints"]
    names = [Path(entry["checkpoint"]).name for entry in entries]
    assert names == ["best.pt", "step-00000002.pt", "step-00000003.pt"]
    assert entries[0] == best
    table = cli("evaluate", "run", "--all", *options)
    assert table.code == 0, table.err
    assert [table.out.count(name) for name in names] == [1, 1, 1]
    assert max(map(len, table.out.splitlines())) <= 80
    refused = cli("evaluate", checkpoints / "best.pt", "--all", *options)
    assert (refused.code, refused.out) == (2, "")


def test_evaluate_begins_with_the_ap(cli: Cli, tiny_run: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    low = ("--device", "cpu", "--limit", 3, "--score-threshold", 0.02)
    result = cli("evaluate", tiny_run, *low)
    assert result.code == 0, result.err
    first, *others = result.out.splitlines()
    figures = json.loads(cli("evaluate", tiny_run, "--json", *low).out)
    objects = sum(entry["objects"] for entry in figures["per_class"])
    for shown in (f"AP {figures['AP']:.3f}", "3 images", f"{objects} objects", "fp32"):
        assert shown in first
    text = "\n".join(others)
    for entry in (*figures["per_class"], *figures["errors"]):
        assert re.search(rf"^{entry.get('name', '')}", text, re.MULTILINE)
    assert "0.02" in text  # the score threshold
    assert max(map(len, others)) <= 80
    quiet = cli("evaluate", tiny_run, "-q", *low)
    assert (quiet.out, quiet.err) == (first + "\n", "")


def test_evaluate_computes_in_the_precision_of_the_run(cli: Cli, checkpoint: Path) -> None:
    import torch

    payload = torch.load(checkpoint, weights_only=True)
    for trained, chosen in (("bf16", "bf16"), ("fp16", "fp32")):  # a CPU does not compute in fp16
        payload["config"]["train.precision"] = trained
        torch.save(payload, "other.pt")
        result = cli("evaluate", "other.pt", "--device", "cpu", "--limit", 2, "--json")
        assert json.loads(result.out)["precision"] == chosen
        assert (trained in result.err) == (trained != chosen)
    result = cli("evaluate", "other.pt", "--device", "cpu", "--limit", 2, "--bf16", "--json")
    assert json.loads(result.out)["precision"] == "bf16"


def test_zero_detections_are_a_warning(cli: Cli, checkpoint: Path) -> None:
    result = cli("evaluate", checkpoint, "--score-threshold", 1, "--json", "--device", "cpu")
    assert result.code == 0
    assert json.loads(result.out)["AP"] == 0
    assert "warning" in result.err


def test_a_results_file_without_detections_is_a_warning(cli: Cli, shapes: Path) -> None:
    Path("none.json").write_text("[]")
    result = cli("evaluate", "none.json", "--data", shapes, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["AP"] == 0
    assert "warning: none.json" in result.err


def test_predict_draws_and_lists(cli: Cli, checkpoint: Path, shapes: Path, tmp_path: Path) -> None:
    Path("bad.jpg").write_text("no picture")
    pictures = sorted((shapes / "val2017").iterdir())[:2]
    result = cli(
        "predict", checkpoint, *pictures, "bad.jpg", "--out", "drawn", "--score", 0.01, "--json"
    )
    assert result.code == 3  # one file was not a picture; the others were processed
    assert "bad.jpg" in result.err
    answers = json.loads(result.out)
    assert [a["image"] for a in answers] == [str(p) for p in pictures]
    for answer in answers:
        for detection in answer["detections"]:
            left, top, right, bottom = detection["box"]
            assert 0 <= left <= right
            assert 0 <= top <= bottom
            assert detection["score"] >= 0.01
    assert sorted(p.name for p in Path("drawn").glob("*.jpg")) == [p.name for p in pictures]


def test_export_to_third_party_formats(cli: Cli, checkpoint: Path) -> None:
    import torch

    assert cli("export", checkpoint, "--format", "mlperf", "--out", "iter_3.pt").code == 0
    payload = torch.load("iter_3.pt", weights_only=True)
    assert payload["label_map"][5] == "ring"
    assert "model.layer1.0.weight" in payload["model"]
    assert cli("export", checkpoint, "--format", "nvidia", "--out", "x.pt").code == 2
    Path("own.pt").write_bytes(checkpoint.read_bytes())
    refused = cli("export", "own.pt", "--format", "safetensors", "--out", "./own.pt")
    assert refused.code == 2
    assert "is the checkpoint itself" in refused.err
    assert Path("own.pt").read_bytes() == checkpoint.read_bytes()
    assert cli("export", checkpoint, "--format", "safetensors", "--out", "x.safetensors").code == 0


@pytest.mark.process
def test_benchmark_commands(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssdctl.benchmark.common.TRAIN_IMAGES", 8)
    monkeypatch.setattr("ssdctl.benchmark.common.VAL_IMAGES", 1)
    monkeypatch.setattr("ssdctl.benchmark.data.TIMED_IMAGES", 4)
    monkeypatch.setattr("ssdctl.benchmark.data.BATCH_SIZE", 4)
    options = ("--gpu-rate", 1e6, "--gpus", 8)
    figures = json.loads(cli("benchmark", "data", "--seconds", 0.3, "--json", *options).out)
    assert figures["images_per_second"] > 0
    assert figures["required_images_per_second"] == 8e6
    assert figures["required_cores"] > 1000
    assert figures["is_sufficient"] is False
    assert figures["images_per_second_full"] > 0
    for stage in ("draw_ms", "read_ms", "decode_ms", "crop_resize_ms"):
        assert figures[stage] > 0


def test_an_infinite_rate_is_refused(cli: Cli) -> None:
    assert cli("benchmark", "data", "--gpu-rate", "inf").code == 2


@pytest.mark.slow
def test_benchmark_of_compiled_data(cli: Cli) -> None:
    done = cli("benchmark", "data", "--execution", "compile", "--seconds", 0.3, "--json")
    figures = json.loads(done.out)
    assert figures["images_per_second_full"] > 0
    assert figures["execution"] == ("eager" if "not compiled" in done.err else "compile")


@pytest.mark.process
def test_benchmark_of_evaluation(shapes: Path, tmp_path: Path) -> None:
    from ssdctl.benchmark.evaluate import benchmark_evaluate
    from ssdctl.config.resolve import Override, resolve
    from ssdctl.config.sources import of_call
    from ssdctl.data.open_dataset import open_dataset

    backbone = Override("model.backbone", "tiny", of_call("--backbone"))
    config = resolve(
        overrides=[backbone, Override("evaluate.batch_size", 2, of_call("--bs"))]
    ).config
    split = open_dataset(shapes, tmp_path / "store")["val"]
    figures = benchmark_evaluate(split, config, 0.1, score_images=20)
    assert figures["detect_images_per_second"] > 0
    assert 0 < figures["score_s"] < 5
    assert figures["latency_p50_ms"] <= figures["latency_p90_ms"] <= figures["latency_p99_ms"]
    assert figures["forward_images_per_second"] > 0
    assert figures["score_detections"] == 2216


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_to_a_full_disk() -> None:
    """A lost result is a disk error; lost messages on stderr are not."""
    command = [sys.executable, "-m", "ssdctl"]
    with Path("/dev/full").open("w") as full:
        for options in (["config", "show"], ["config", "show", "--json"], ["--help"]):
            done = subprocess.run(
                [*command, *options], stdout=full, stderr=subprocess.PIPE, text=True
            )
            assert done.returncode == 6
            assert "no space left while writing standard output" in done.stderr
            assert "Traceback" not in done.stderr
        assert subprocess.run([*command, "config", "show", "nothing"], stderr=full).returncode == 2


@pytest.mark.parametrize(
    "command", ["config schema", "--help", "train --help", "config show --json"]
)
def test_a_closed_stdout_is_one_that_cannot_be_written(command: str) -> None:
    """As with `| head`: no message, and not the exit code of a bug."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "ssdctl", *command.split()], stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (6, b"")


def test_a_closed_stderr_ends_nothing(shapes: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "ssdctl", "prepare", "--data", shapes, "--no-pack"]
    done = subprocess.run(
        [*command, "--store", tmp_path / "store", "--force"], stdout=subprocess.PIPE, stderr=write
    )
    assert done.returncode == 0
    assert done.stdout
    # The error's own message is lost, its exit code is not.
    assert (
        subprocess.run(
            [*command, "--store", tmp_path / "store", "--split", "9"], stderr=write
        ).returncode
        == 2
    )
    os.close(write)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_the_caller_closed(closed: str) -> None:
    script = f'exec "$@" {closed}'
    command = [sys.executable, "-m", "ssdctl", "config", "show", "train.epochs"]
    done = subprocess.run(["sh", "-c", script, "sh", *command], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("train.epochs" in done.stdout) == (closed == "2>&-")


def test_no_colour_without_a_terminal(cli: Cli) -> None:
    result = process("config", "presets")
    assert "\x1b" not in result.stdout
    assert "\x1b" not in process("train", "--lr", "x").stderr


def test_ctrl_c_that_python_wraps_is_an_interrupt(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 raises a RuntimeError if it comes while a class is created."""

    def create_class(_config: object) -> None:
        raise RuntimeError("Error calling __set_name__") from KeyboardInterrupt()

    monkeypatch.setattr("ssdctl.config.render.values", create_class)
    assert cli("config", "show") == Result(130, "", "")


@pytest.mark.slow(in_ci=True)
def test_interrupt_causes_no_traceback() -> None:
    command = [sys.executable, "-m", "ssdctl", "benchmark", "data", "--seconds", "60"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    assert "generated shapes" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    _, words = running.communicate(timeout=60)
    assert running.returncode == 130, words
    assert "Traceback" not in words


@pytest.mark.parametrize("module", ["ssdctl.cli", "typer", "ssdctl.config.schema", "rich"])
def test_ctrl_c_while_it_starts_shows_no_traceback(module: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "ssdctl", "config", "show"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    for line in running.stderr:
        if line.rpartition("|")[2].strip() == module:
            break
    running.send_signal(signal.SIGINT)
    _, rest = running.communicate(timeout=60)
    assert running.returncode in (-signal.SIGINT, 130)
    assert "Traceback" not in rest


@pytest.mark.slow(in_ci=True)
def test_the_first_process_of_a_container_ends_on_sigterm() -> None:
    """The kernel ignores SIGTERM for it if there is no handler, and the device stays in use."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-pf", "true"]).returncode:
        pytest.skip("no process namespaces here")
    argv = ["unshare", "-pf", "--kill-child", sys.executable, "-m", "ssdctl"]
    argv += ["benchmark", "data", "--seconds", "300"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as outer:
        assert outer.stderr is not None
        assert "measuring" in outer.stderr.readline()
        first = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(first[0]), signal.SIGTERM)
        try:
            assert outer.wait(30) == 128 + signal.SIGTERM
        finally:
            outer.kill()
