"""Commands in processes and with checkpoints: imports, streams, signals, scores, runs."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Cli
from PIL import Image

import ssdctl
from ssdctl.benchmark.evaluate import benchmark_evaluate
from ssdctl.data.open_dataset import open_dataset
from ssdctl.errors import ExitCode

SSDCTL = (sys.executable, "-m", "ssdctl")
DEAD = "0123456789ab.999999999.tmp"  # the end of the name of what a killed process left


def process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*SSDCTL, *map(str, arguments)]
    return subprocess.run(command, text=True, timeout=120, **options)  # type: ignore[call-overload]


def test_light_commands_do_not_import_torch(shapes: Path, tmp_path: Path) -> None:
    results = tmp_path / "detections.json"
    results.write_text("[]")
    commands = {
        "--help": 0,
        "train --help": 0,
        f"train --data {shapes} --dry-run": 0,
        "config show": 0,
        f"evaluate {results} --data {shapes}": 0,
        "launch --hpus 8 --dry-run": 0,
        "export absent.pt --format onnx --out ssd.onnx": 2,
    }
    code = (
        "import json, sys; from ssdctl.cli.main import main\n"
        "for command, expected in json.loads(sys.argv[1]).items():\n"
        "    try: main(command.split())\n"
        "    except SystemExit as e: code = e.code\n"
        "    assert (code or 0) == expected, (command, code)\n"
        "    assert 'torch' not in sys.modules and 'torchvision' not in sys.modules, command"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(commands)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def changed(checkpoint: Path, path: str, value: str) -> Path:
    """Return a copy of a checkpoint that remembers another value of a setting."""
    payload = torch.load(checkpoint, weights_only=True)
    payload["config"][path] = value
    torch.save(payload, "changed.pt")
    return Path("changed.pt")


def test_a_moved_dataset_is_reported(cli: Cli, checkpoint: Path, shapes: Path) -> None:
    moved = changed(checkpoint, "data.root", "/nowhere/coco")
    Path("data").mkdir()
    Path("data/coco").symlink_to(shapes)
    options = ("--device", "cpu", "--limit", 2)
    cli("evaluate", moved, *options).expect(3, "/nowhere/coco", "--data data/coco")
    cli("evaluate", moved, *options, "--data", "data/coco").expect(0)
    cli("export", moved, "--format", "onnx", "--out", "a.onnx").expect(0)  # it scores nothing
    shutil.copytree(shapes, "changed")
    shutil.copy("changed/train2017/000000000001.jpg", "changed/train2017/new.jpg")
    moved = changed(checkpoint, "data.root", str(Path("changed").absolute()))
    export = ("export", moved, "--format", "onnx", "--out", "b.onnx")
    cli(*export, "--int8").expect(3, "changed since it was prepared")
    cli(*export).expect(0, "agrees with PyTorch")


def test_evaluate_a_run_folder(cli: Cli, tiny_run: Path) -> None:
    """The best checkpoint, or every one with --all."""
    shutil.copytree(tiny_run, "run")
    checkpoints = Path("run/checkpoints")
    shutil.copy(changed(checkpoints / "best.pt", "train.seed", 5), checkpoints / "step-00000002.pt")
    options = ("--device", "cpu", "--limit", 2)
    best = json.loads(cli("evaluate", "run", "--json", *options).out)
    assert (best["checkpoint"], best["images"]) == ("run/checkpoints/best.pt", 2)
    entries = json.loads(cli("evaluate", "run", "--all", "--json", *options).out)["checkpoints"]
    names = [Path(entry["checkpoint"]).name for entry in entries]
    assert names == ["step-00000002.pt", "step-00000003.pt"]  # best.pt is a copy of the last
    assert entries[1] == {**best, "checkpoint": entries[1]["checkpoint"]}
    refused = cli("evaluate", checkpoints / "best.pt", "--all", *options)
    assert (refused.code, refused.out) == (2, "")


def test_a_checkpoint_named_in_its_own_folder_belongs_to_its_run(
    cli: Cli, tiny_run: Path, image_file: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_run / "checkpoints")
    ours, theirs = (
        cli("predict", name, image_file, "--json", "--device", "cpu")
        for name in ("best.pt", tiny_run / "checkpoints/best.pt")
    )
    assert (ours.code, ours.out) == (0, theirs.out)
    assert "score thresholds: each class" in ours.err
    plan = cli("train", "--data", dataset, "--init", "best.pt", "--dry-run")
    assert "runs/dataset-tiny" in plan.out
    monkeypatch.chdir(dataset / "annotations")
    assert cli("prepare", "--data", "instances_val2017.json", "--no-pack").code == 0


def test_an_id_without_a_home(cli: Cli, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    for line in (["models"], ["report", tiny_run, "--out", "r.html"], ["fetch-weights", "--list"]):
        assert (result := cli(*line)).code == 0, result.err


def test_evaluate_computes_in_the_precision_of_the_run(cli: Cli, checkpoint: Path) -> None:
    for trained, chosen in (("bf16", "bf16"), ("fp16", "fp32")):  # a CPU does not compute in fp16
        other = changed(checkpoint, "train.precision", trained)
        result = cli("evaluate", other, "--device", "cpu", "--limit", 2, "--json")
        assert json.loads(result.out)["precision"] == chosen
        assert (trained in result.err) == (trained != chosen)
    options = ["--device", "cpu", "--eval_samples", 2, "--batch_size", 2, "--bf16", "--json"]
    found = json.loads(cli("evaluate", *options, "--checkpoint", other).out)
    assert (found["precision"], found["images"]) == ("bf16", 2)


def test_export_to_third_party_formats(cli: Cli, checkpoint: Path) -> None:
    for _ in range(2):
        assert cli("export", checkpoint, "--format", "mlperf", "--out", "iter_3.pt").code == 0
    payload = torch.load("iter_3.pt", weights_only=True)
    assert payload["label_map"][5] == "ring"
    assert "model.layer1.0.weight" in payload["model"]
    assert cli("export", checkpoint, "--format", "nvidia", "--out", "x.pt").code == 2
    Path("own.pt").write_bytes(checkpoint.read_bytes())
    refused = cli("export", "own.pt", "--format", "safetensors", "--out", "./own.pt")
    refused.expect(2, "is the checkpoint itself")
    assert Path("own.pt").read_bytes() == checkpoint.read_bytes()
    absent = ("--format", "onnx", "--out", "x.onnx", "--data", "absent")
    assert cli("export", checkpoint, *absent).code == 3
    done = cli("export", checkpoint, "--format", "mlperf", "--out", "x.onnx")
    assert (done.code, "x.onnx: " in done.err, "predict" in done.err) == (0, True, False)
    Path("own.bin").write_bytes(checkpoint.read_bytes())
    Path("own.xml").touch()
    for source in ("own.bin", checkpoint):  # OpenVINO writes two files
        assert cli("export", source, "--format", "openvino", "--out", "own.xml").code == 2
    assert Path("own.bin").read_bytes() == checkpoint.read_bytes()
    for name, has_warning in (("x.safetensors", False), ("x.bin", True), ("x.bin", True)):
        done = cli("export", checkpoint, "--format", "safetensors", "--out", name)
        assert (done.code, f"{name}: " in done.err) == (0, has_warning)


def test_export_to_nvidias_format(cli: Cli) -> None:
    ssdctl.SSD300("tiny", 3, "batch").save("own.pt", class_names=["a", "b"])
    nvidia = ("--format", "nvidia", "--out", "epoch_1.pt")
    cli("export", "own.pt", *nvidia).expect(0, "81")  # other classes than COCO's
    assert cli("export", "own.pt", "--format", "mlperf", "--out", "x.pt").code == 2


@pytest.mark.parametrize("name", ["data", "train"])
def test_a_benchmark_without_training_images(cli: Cli, dataset: Path, name: str) -> None:
    (dataset / "annotations/instances_train2017.json").unlink()
    cli("benchmark", name, "--store", "x").expect(2, "--store")  # of no dataset
    cli("benchmark", name, "--data", dataset, "--seconds", 0.1).expect(3, "train")
    Path("data").mkdir()
    dataset.rename("data/coco")
    cli("benchmark", name, "--seconds", 0.1).expect(3, "train")


def test_benchmark_of_evaluation(shapes: Path, tmp_path: Path) -> None:
    config = ssdctl.configure(model={"backbone": "tiny"}, evaluate={"batch_size": 2})
    split = open_dataset(shapes, tmp_path / "store")["val"]
    metrics = benchmark_evaluate(split, config, 0.1, score_images=20)
    assert metrics["detect_images_per_second"] > 0
    assert 0 < metrics["score_s"] < 5
    assert metrics["images_per_second"] > 0
    assert metrics["score_detections"] == 2216


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_output_to_a_full_disk() -> None:
    """A lost result is a disk error; lost messages on stderr are not."""
    with Path("/dev/full").open("w") as full:
        for options in (["config", "show", "--json"], ["--help"]):
            done = process(*options, stdout=full, stderr=subprocess.PIPE)
            assert done.returncode == 6
            assert "no space left while writing standard output" in done.stderr
            assert "Traceback" not in done.stderr
        assert process("config", "show", "nothing", stderr=full).returncode == 2


@pytest.mark.parametrize("command", ["--help", "config show --json"])
def test_a_closed_stdout_is_one_that_cannot_be_written(command: str) -> None:
    """As with `| head`: no message, and not the exit code of a bug."""
    read, write = os.pipe()
    os.close(read)
    done = process(*command.split(), stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert (done.returncode, done.stderr) == (6, "")


def test_a_closed_stderr_ends_nothing(shapes: Path, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = ["prepare", "--data", shapes, "--no-pack", "--store", tmp_path / "store"]
    done = process(*command, "--force", stdout=subprocess.PIPE, stderr=write)
    assert (done.returncode, bool(done.stdout)) == (0, True)
    # The error's own message is lost, its exit code is not.
    assert process(*command, "--split", "9", stderr=write).returncode == 2
    os.close(write)


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_without_leaving_files(
    tmp_path: Path, sent: signal.Signals
) -> None:
    command = [*SSDCTL, "benchmark", "data", "--seconds", "300"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    running = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert "measuring" in running.stderr.readline()
    assert list(tmp_path.glob("ssdctl-benchmark-*"))
    running.send_signal(sent)
    _, rest = running.communicate(timeout=60)
    assert running.returncode == ExitCode.STOPPED, rest
    assert f"stopped by {sent.name}\n" in rest
    assert not list(tmp_path.glob("ssdctl-*"))


@pytest.mark.slow(in_ci=True)
def test_the_first_process_of_a_container_ends_on_sigterm() -> None:
    """The kernel ignores SIGTERM for it if there is no handler, and the device stays in use."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-pf", "true"]).returncode:
        pytest.skip("no process namespaces here")
    argv = ["unshare", "-pf", "--kill-child", *SSDCTL, "benchmark", "data", "--seconds", "300"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True) as outer:
        assert "measuring" in outer.stderr.readline()
        first = Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()
        os.kill(int(first[0]), signal.SIGTERM)
        try:
            assert outer.wait(30) == ExitCode.STOPPED
        finally:
            outer.kill()


@pytest.mark.parametrize(
    ("command", "file"),
    [
        ("export CHECKPOINT --format safetensors --out out/x", "out/.x."),
        ("report RUN --out out/x", "out/.x."),
        ("predict CHECKPOINT a.png --out out", "out/.a.png."),
        ("dataset export DATA --to yolo --out out/x", "out/.x.partial/"),
    ],
)
def test_the_next_command_removes_what_a_killed_one_left(
    command: str, file: str, tiny_run: Path, checkpoint: Path, shapes: Path, cli: Cli
) -> None:
    Image.new("RGB", (40, 30)).save("a.png")
    left, other = Path(file + DEAD), Path(f"out/notes.{DEAD}")
    left.parent.mkdir(parents=True)
    left.touch()
    other.touch()
    names = {"RUN": tiny_run, "CHECKPOINT": checkpoint, "DATA": shapes}
    cli(*(names.get(word, word) for word in command.split())).expect(0)
    assert not left.exists()
    assert other.exists()


@pytest.fixture
def folder(tiny_run: Path) -> Path:
    """Return `runs/`: an old run, a new one, a deeper one in progress, and a broken one."""
    for number, name in enumerate(("old", "new", "sweep/deep", "broken"), 1):
        shutil.copytree(tiny_run, f"runs/{name}")
        os.utime(f"runs/{name}/metrics.jsonl", (number * 1000, number * 1000))
    Path("runs/sweep/deep/.lock").write_text(f"{os.getpid()} on {socket.gethostname()}")
    Path("runs/new/.lock").write_text(f"{2**22 + 1} on {socket.gethostname()}")  # was killed
    Path("runs/broken/config.toml").write_text("[[[")
    Path("runs/old/checkpoints/step-00000007.pt").touch()  # saved before the next record
    return Path("runs")


def test_runs_are_listed_with_the_newest_first(cli: Cli, folder: Path) -> None:
    config = folder / "new/config.toml"
    config.write_text(config.read_text().replace('/shapes"', '/parts.v3"'))
    entries = json.loads(cli("runs", "--json").out)
    assert [e["path"] for e in entries] == [
        "runs/broken", "runs/sweep/deep", "runs/new", "runs/old",
    ]  # fmt: skip
    _, deep, new, old = entries
    assert (new["data"], new["network"], new["steps"]) == ("parts.v3", "tiny", 3)
    assert new["ap"] == ssdctl.Run("runs/new").best_metrics["AP"]
    assert old["steps"] == 7
    assert "running" in deep["state"]
    assert new["state"] == old["state"] == ""
    assert "config.toml" in entries[0]["state"]
    lines = cli("runs", folder).out.splitlines()
    assert all(any(e["path"] in line for line in lines) for e in entries)
    assert json.loads(cli("runs", "runs/sweep", "--json").out) == [deep]
    assert len({tuple(sorted(e)) for e in entries}) == 1  # the same keys
    assert cli("runs", "absent").code == 2
    long = folder / ("a long name " * 9)
    (folder / "new").rename(long)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS")  # a pipe has no width
        assert any(str(long) in line for line in cli("runs").out.splitlines())
        patch.setenv("COLUMNS", "40")  # leaves out columns, not the ends of numbers
        assert {f"{new['ap']:.3f}", "7"} <= {*cli("runs").out.split()}
    Path("none").mkdir()
    assert (cli("runs", "none").code, json.loads(cli("runs", "none", "--json").out)) == (0, [])


def test_commands_use_the_newest_run(cli: Cli, folder: Path) -> None:
    shutil.rmtree("runs/broken")
    shutil.rmtree("runs/sweep/deep/checkpoints")
    for command, run in (
        (["evaluate", "--limit", "1", "--device", "cpu"], "runs/new"),
        (["export", "--format", "mlperf", "--out", "x.pt"], "runs/new"),
        (["report"], "runs/sweep/deep"),  # needs no checkpoint
    ):
        result = cli(*command).expect(0)
        assert result.err.splitlines()[0].endswith(f" {run}")
    shutil.move("runs/new", "elsewhere")
    shutil.rmtree("runs/old")
    for command in (["evaluate"], ["export", "--format", "mlperf", "--out", "x.pt"]):
        result = cli(*command)
        assert (result.code, result.out) == (2, "")
        assert "elsewhere" in result.err
