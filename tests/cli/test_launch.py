"""`ssdctl launch` as users type it, without running a job."""

import json
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
from conftest import Result, run_cli
from launch.plans import IN_A_POD
from launch.test_requests import _without_variables  # noqa: F401 - a fixture

from ssdctl.config import PrepareConfig
from ssdctl.data.prepare import prepare
from ssdctl.data.shapes import generate


def launch(*arguments: str) -> Result:
    return run_cli("launch", *arguments)


def ranks_command(plan: Any) -> list[str]:
    argv: list[str] = plan["argv"]
    return argv[argv.index("ssdctl") + 1 :]


def test_several_nodes_need_their_hosts_and_number() -> None:
    launch("--hpus", "16", "--nodes", "2").expect(2, "--hostfile")
    Path("hosts").write_text("a slots=8\nb slots=8\n")
    launch("--hpus", "16", "--hostfile", "hosts", "--dry-run").expect(2, "give --nodes")


@pytest.mark.parametrize(("launcher", "shown"), [("torchrun", ""), ("slurm", " 'a job.sh'")])
def test_write_replaces_only_what_it_wrote(launcher: str, shown: str) -> None:
    job = ["--cpus", "2", "--launcher", launcher, "--write", "a job.sh"]
    for _ in range(2):
        assert f"wrote a job.sh{shown and '; submit it with sbatch'}{shown}" in launch(*job).err
    Path("mine").write_text("mine")
    Path("link.sh").symlink_to("mine")
    own = "#!/bin/sh\necho mine\n" + Path("a job.sh").read_text()
    Path("own.sh").write_text(own)
    for name in ("mine", "link.sh", "own.sh"):
        launch(*job[:-1], name).expect(2, "not an earlier result")
    assert (Path("mine").read_text(), Path("own.sh").read_text()) == ("mine", own)


def test_a_dry_run_writes_nothing() -> None:
    Path("job.sh").write_text("mine")
    result = launch("--gpus", "8", "--dry-run", "--write", "job.sh")
    assert (result.code, "torch.distributed.run" in result.out) == (0, True)
    assert Path("job.sh").read_text() == "mine"


def test_help_of_another_command() -> None:
    result = launch("--cpus", "2", "--", "evaluate", "--help")
    assert (result.code, "ssdctl evaluate" in result.out) == (0, True)


def test_another_command() -> None:
    options = ["--cpus", "2", "--dry-run", "--json", "--", "evaluate"]
    plan = json.loads(launch(*options, "--bs", "4", "a;b").out)
    assert ranks_command(plan) == ["evaluate", "--bs=4", "a;b"]
    assert plan["environment"]["SSDCTL_EVALUATE__DEVICE"] == "cpu"
    plan = json.loads(launch(*options, "--checkpoint", "x.pt", "--batch_size=4").out)
    assert ranks_command(plan) == ["evaluate", "x.pt", "--bs=4"]
    plan = json.loads(launch(*options[:-1], "benchmark", "train", "--bs", "4").out)
    assert ranks_command(plan) == ["benchmark", "train", "--bs", "4"]
    for named, replaced in (("--device=", "--device"), ("--set= evaluate.device = ", "--set")):
        command = ranks_command(json.loads(launch(*options, f"{named}auto", "a.pt").out))
        assert [word.partition("=")[0] for word in command] == ["evaluate", replaced, "a.pt"]
        assert "auto" not in " ".join(command)
    words = (*options[:-1], "benchmark", "train", "--device", "auto")
    assert ranks_command(json.loads(launch(*words).out))[-2:] == ["--device", "cpu"]
    for other in (["--device", "cuda"], ["--set", "evaluate.device=cuda"]):
        launch(*options, *other, "a.pt").expect(2, "--device cuda contradicts")
    assert launch(*options[:-1], "benchmark", "train", "--device", "hpu").code == 2
    assert launch(*options[:-1], "doctor").code == 0


def test_a_warmup_longer_than_the_run_on_a_prepared_dataset_is_refused() -> None:
    generate(Path("data"), num_train=6, num_val=1)
    job = ("--cpus", "2", "--data", "data", "--bs", "2", "--epochs", "2", "--dry-run")
    assert launch(*job, "--warmup", "100st").code == 0  # the number of images is not known yet
    prepare(Path("data"), Path("data/prepared"), PrepareConfig(pack=False))
    launch(*job, "--warmup", "100st").expect(2, "100 steps")
    assert launch(*job, "--warmup", "3st").code == 0
    assert launch(*job, "--warmup", "4st").code == 2  # 6 images, 2 epochs, 2 ranks of 2: 3 steps
    assert launch(*job, "--preset", "nvidia-r50").code == 0  # the preset's own one is shortened


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hpus", "8"], ["openmpi"]),
        (["--cpus", "2"], ["pip install torch"]),
        (["--gpus", "8", "--launcher", "slurm"], ["sbatch", "--write FILE"]),
        (IN_A_POD, ["kubectl", "--write FILE"]),
    ],
)
def test_an_absent_launcher_is_a_usage_error(
    arguments: list[str], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "torch", None)
    result = launch(*arguments).expect(2)
    assert all(word in " ".join(result.err.split()) for word in words)


@pytest.mark.parametrize("engine", ["torchrun", "mpirun", "slurm"])
def test_a_written_script_contains_the_settings_of_files_and_variables(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may start in another folder, or without the variables."""
    monkeypatch.setenv("SSDCTL_TRAIN__SEED", "3")
    Path("ssdctl.toml").write_text('[data]\nroot = "a b"\n')
    Path("my.toml").write_text("[data]\nroot = 'mine'\n")
    written = ["--cpus", "2", "--launcher", engine, "--write", "job.sh"]
    exported, outer = "export _SSDCTL_FILES=", {"RANK": "9", "PET_NNODES": "2"}
    for more, is_exported in (
        ([], True),
        (["--", "evaluate", "a.pt"], True),
        (["--config", "my.toml"], False),  # the ranks read it
        (["--", "evaluate", "--config", "my.toml", "a.pt"], False),
    ):
        assert launch(*written, *more).code == 0
        lines = Path("job.sh").read_text().splitlines()
        assert "export SSDCTL_TRAIN__SEED=3" in lines
        files = [line for line in lines if line.startswith(exported)]
        assert files == [f"""{exported}'{{"data.root": "a b"}}'"""] * is_exported
        # An outer job's variables would make the ranks wait for that job.
        top = lines[: next(n for n, line in enumerate(lines) if line.startswith("export "))]
        done = subprocess.run(
            ["bash"], input="\n".join([*top, "env"]), env=outer, check=True, stdout=PIPE, text=True
        )
        assert not any(line.startswith(tuple(outer)) for line in done.stdout.splitlines())
