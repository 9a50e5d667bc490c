"""`ssdctl launch` as users type it, without running a job."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ssdctl.cli.main import main
from ssdctl.data.prepare import prepare
from ssdctl.data.shapes import generate
from ssdctl.launch import run


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "MPI_ROOT", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def launch(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["launch", *arguments])
    return int(end.value.code or 0)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert launch(*arguments, "--dry-run", "--json") == 0
    return json.loads(capsys.readouterr().out)


def ranks_command(plan: Any) -> list[str]:
    argv: list[str] = plan["argv"]
    return argv[argv.index("ssdctl") + 1 :]


def test_eight_gaudi_cards(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        launch("--hpus", "8", "--bs", "128", "--bf16", "--dry-run", "--cores-per-node", "48") == 0
    )
    words = shlex.split(capsys.readouterr().out)
    assert words[:9] == shlex.split(
        "mpirun -n 8 --bind-to core --map-by ppr:8:node:PE=6 --rank-by slot"
    )
    assert words[words.index("-m") - 1 :] == [
        *(sys.executable, "-m", "ssdctl", "train", "--bs=128", "--bf16", "--device=hpu")
    ]


def test_json_and_the_command_line_agree(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, "--cpus", "2")
    assert list(plan) == ["argv", "environment", "command"]
    assignments = [f"{k}={v}" for k, v in plan["environment"].items()]
    assert shlex.split(plan["command"]) == [*assignments, *plan["argv"]]


def test_options_of_train_are_passed_on_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my.toml").write_text("[train]\nlr = 1e-3\n")
    plan = planned(
        capsys,
        *("--cpus", "2", "--config", "my.toml", "--set", "train.seed=7", "--set", "launch.nodes=1"),
        *("--resume-changed", "--data=-x; $(touch y)\nz", "--eval-every", "3ep", "-q", "-v"),
    )
    command = ranks_command(plan)
    assert command[:3] == ["train", "--config=my.toml", "--set=train.seed=7"]
    assert sorted(command[3:]) == [
        "--data=-x; $(touch y)\nz",
        "--device=cpu",
        "--eval-every=3ep",
        "--quiet",
        "--resume-changed",
        "--verbose",
    ]
    assert not Path("y").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--cpus", "2", "--gpus", "2"],
        ["--cpus", "0"],
        ["--cpus", "3", "--nodes", "2"],
        ["--cpus", "2", "--bs", "x"],
        ["--cpus", "2", "--set", "train.nonsense=1"],
        ["--cpus", "2", "--nonsense"],
        ["--cpus", "2", "--batch-splits", "4"],
        ["--cpus", "2", "--device", "cuda"],
        ["--cpus", "2", "--set", "train.device=hpu"],
        ["--tpus", "4", "--launcher", "slurm"],
        ["--gpus", "8", "--launcher", "slurm", "--set", "slurm.partition=a b"],
        ["--gpus", "8", "--launcher", "nonsense"],
        ["--hpus", "8", "--hostfile", "absent"],
        ["--cpus", "2", "--", "nonsense"],
        ["--cpus", "2", "--", "launch", "--cpus", "2"],
        ["--cpus", "2", "8"],
    ],
    ids=" ".join,
)
@pytest.mark.process
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch(*arguments, *([] if "--" in arguments else ["--dry-run"])) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err


def test_the_device_may_be_given_twice(capsys: pytest.CaptureFixture[str]) -> None:
    for device in ("cpu", "auto"):
        assert ranks_command(planned(capsys, "--cpus", "2", "--device", device)) == [
            *("train", "--device=cpu")
        ]


@pytest.mark.process
def test_several_nodes_without_a_host_are_shown_but_not_written(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert launch("--hpus", "16", "--nodes", "2", "--dry-run") == 0
    captured = capsys.readouterr()
    assert "MASTER_ADDR=HOST" in captured.out
    assert "--hostfile" in captured.err
    assert launch("--hpus", "16", "--nodes", "2", "--write", "job.sh") == 2
    assert launch("--hpus", "16", "--nodes", "2") == 2
    assert not Path("job.sh").exists()


def test_write_creates_an_executable_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--cpus", "2", "--data", "a b;c", "--write", "deep/job.sh") == 0
    script = Path("deep/job.sh")
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    assert f"exec {sys.executable} -m torch.distributed.run" in script.read_text()
    assert "'--data=a b;c'" in script.read_text()
    assert list(Path("deep").iterdir()) == [script]


@pytest.mark.parametrize("engine", [[], ["--launcher", "slurm"]])
@pytest.mark.process
def test_write_names_the_file_that_it_replaces(
    engine: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["--cpus", "2", *engine, "--write", "job.sh"]
    assert launch(*job) == 0
    assert "replaced" not in capsys.readouterr().err
    Path("job.sh").write_text("mine")
    assert launch(*job) == 0
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "replaced" in line]
    assert "job.sh" in line
    assert Path("job.sh").read_text() != "mine"
    Path("job.sh").unlink()
    Path("job.sh").symlink_to("mine")  # its target would be replaced, or created
    Path("mine").write_text("mine")
    assert launch(*job) == 0
    assert Path("mine").read_text() == "mine"


@pytest.mark.process
def test_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert launch("--cpus", "2", "--dry-run", "--json", "--", "evaluate", "--bs", "4", "a;b") == 0
    plan = json.loads(capsys.readouterr().out)
    assert ranks_command(plan) == ["evaluate", "--bs", "4", "a;b"]
    assert plan["environment"]["SSDCTL_EVALUATE__DEVICE"] == "cpu"
    aliases = ["evaluate", "--checkpoint", "x.pt", "--batch_size=4"]
    assert launch("--cpus", "2", "--dry-run", "--json", "--", *aliases) == 0
    plan = json.loads(capsys.readouterr().out)
    assert ranks_command(plan) == ["evaluate", "x.pt", "--bs=4"]
    # Options before -- are train's, and train is not what is launched.
    assert launch("--cpus", "2", "--bs", "4", "--dry-run", "--", "evaluate", "x") == 2
    assert "--bs is an option of train" in capsys.readouterr().err
    assert launch("--cpus", "2", "train", "--bs", "4", "--dry-run") == 2
    assert "leave out the word train" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["train", "--batch-splits", "3"], "--accumulate"),
        (["train", "--epocs", "3"], "--epochs"),
        (["evaluate", "--splitt", "val"], "--split"),
    ],
    ids=str,
)
def test_unknown_options_after_the_dashes_are_refused_before_the_launch(
    command: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch("--cpus", "2", "--", *command) == 2
    error_text = capsys.readouterr().err
    assert words in error_text
    assert "torch.distributed" not in error_text  # nothing was started


def test_torch_is_never_imported() -> None:
    code = (
        "import sys\n"
        "from ssdctl.cli.main import main\n"
        "from ssdctl.launch.run import _has_torchrun\n"
        "assert _has_torchrun()\n"
        "try: main(['launch', '--cpus', '2', '--dry-run'])\n"
        "finally: assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.slow(in_ci=True)
def test_stdout_contains_only_the_json_result() -> None:
    """The output of the ranks goes to stderr."""
    command = [sys.executable, "-m", "ssdctl", "launch", "--cpus", "1", "--json"]
    done = subprocess.run([*command, "--", "config", "presets"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "mlperf-r34" in done.stderr


def test_absent_mpirun_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert launch("--hpus", "8") == 2
    assert "openmpi" in capsys.readouterr().err


def test_the_end_of_a_failed_ranks_log_is_printable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks inherit the terminal; this is what launch itself prints of them."""
    monkeypatch.setattr(run, "run", lambda plan, **_: run.JobOutcome(7, {1: 7, 0: 8}))
    log = Path("run/logs/rank-1.log")
    log.parent.mkdir(parents=True)
    log.write_text("--- rank 1, process 2\nlost \x1b]0;title\x07\x1b[2J\u202e\rerror: fake\n")
    assert launch("--cpus", "2", "--out", "run") == 7
    error_text = capsys.readouterr().err
    assert r"lost \x1b]0;title\x07\x1b[2J\u202e" in error_text
    assert not set("\x1b\x07\u202e") & set(error_text)
    assert "\nerror: fake" not in error_text


def test_absent_torch_is_a_usage_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert launch("--cpus", "2") == 2
    assert "pip install torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "subject"),
    [
        (["--hpus", "8", "--fp16"], "fp16"),
        (["--tpus", "4", "--fp16"], "fp16"),
        (["--tpus", "4", "--execution", "compile"], "--execution lazy"),
        (["--gpus", "4", "--execution", "lazy"], "--execution compile or eager"),
        (["--gpus", "8", "--warmup", "1200"], "--warmup 1200st"),
        (["--gpus", "8", "--warmup", "20st", "--steps", "10"], "--warmup 1st"),
        (["--tpus", "8", "--epochs", "3", "--warmup", "3.5"], "--warmup 300st"),
        (["--hpus", "8", "--cluster", "voyager", "--warmup", "1200"], "--warmup 1200st"),
    ],
)
def test_what_the_ranks_would_refuse_is_refused(
    arguments: list[str], subject: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(*arguments, "--dry-run") == 2
    captured = capsys.readouterr()
    assert subject in captured.err
    assert captured.out == ""


@pytest.mark.process
def test_a_warmup_longer_than_the_run_on_a_prepared_dataset_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    generate(Path("data"), num_train=6, num_val=1)
    job = ("--cpus", "2", "--data", "data", "--bs", "2", "--epochs", "2", "--dry-run")
    assert launch(*job, "--warmup", "100st") == 0  # the number of images is not known yet
    prepare(Path("data"), Path("data/prepared"), pack=False)
    assert launch(*job, "--warmup", "100st") == 2
    assert "100 steps" in capsys.readouterr().err
    assert launch(*job, "--warmup", "1st") == 0
    assert launch(*job, "--preset", "nvidia-r50") == 0  # the preset's own one is shortened


@pytest.mark.parametrize(("device", "is_noted"), [("--hpus", True), ("--gpus", False)])
@pytest.mark.process
def test_a_presets_precision_falls_back_with_a_notice(
    device: str, is_noted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch(device, "8", "--preset", "nvidia-r50", "--dry-run") == 0
    assert ("fp16" in capsys.readouterr().err) == is_noted


@pytest.mark.parametrize(
    ("options", "subject"),
    [
        (["--data", "/home/me/coco"], "--data"),
        ([], "--data"),
        (["--data", "/work/coco", "--backbone-weights", "/home/me/r34.pth"], "--backbone-weights"),
        (["--data", "/work/coco"], None),
        (["--fake-data"], None),
    ],
)
def test_pods_need_their_files_on_a_volume(
    options: list[str], subject: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ssdctl.toml").write_text(
        '[launch]\ncluster = "voyager"\n[kubernetes]\nvolumes = ["/ceph/me:/work"]\n'
        'install = "/work/ssdctl.whl"\n[train]\nout = "/work/run"\n'
    )
    assert launch("--hpus", "8", *options, "--dry-run") == 0
    assert launch("--hpus", "8", *options, "--write", "job") == (0 if subject is None else 2)
    assert subject is None or subject in capsys.readouterr().err
