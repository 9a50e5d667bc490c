"""`ssdctl doctor` as users type it: on this machine and on all ranks for real, and its output."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Cli, Result
from doctor.machines import Machine, expect

from ssdctl.doctor import data as network


@pytest.mark.slow
def test_this_machine_for_real_with_the_self_test(shapes: Path) -> None:
    before = sorted(shapes.rglob("*"))
    code = (
        "import sys; from ssdctl.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert 'torch' not in sys.modules"
    )
    arguments = ["doctor", "--data", str(shapes), "--self-test", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checks = json.loads(done.stdout)
    assert all(c.keys() == {"name", "state", "detail", "remedy", "group"} for c in checks)
    by_name = {c["name"]: c for c in checks}
    assert {"python", "torch", "cores", "dataset"} <= by_name.keys()
    expect(by_name["all-reduce"], "ok", "4 MB in ")
    assert re.match(r"--device auto is \w+: .*(fp32|bf16)", by_name["train step"]["detail"])
    flags = Path("/proc/cpuinfo").read_text()
    is_native = re.search(r"avx512_bf16|amx_bf16|\bbf16\b", flags) is not None
    assert ("bf16 native" in by_name["cpu"]["detail"]) == is_native
    assert "self-test: two ranks" in done.stderr
    assert sorted(shapes.rglob("*")) == before


RANKS = '{"all_reduce_s": 0.002, "bytes": 4194304}'
STEP = """{"device": "cpu", "label": "Test CPU", "precision": "fp32", "execution": "eager"}
{"loss": 9.5, "first_s": 3.0, "step_s": 0.25}"""
EXIT_1 = "sys.stderr.write('no luck'); sys.stderr.flush(); os._exit(1)"


def test_verdicts_of_the_self_test(machine: Machine, tmp_path: Path) -> None:
    """Each probe prints what it prints on a good machine, then what it prints on a bad one."""
    arguments = ("--self-test", "--data", tmp_path, "--set", "train.device=cpu")
    for name, text in (("ranks", RANKS), ("step", STEP)):
        machine.probe_prints(name, text)
    checks = machine.doctor(*arguments)
    expect(checks["all-reduce"], "ok", "4 MB in 2.0 ms")
    expect(checks["train step"], "ok", "Test CPU, fp32, eager", "first 3.0 s", "0.25 s")

    machine.probe_prints("ranks", "{}", EXIT_1)
    machine.probe_prints("step", STEP.splitlines()[0], EXIT_1)
    checks = machine.doctor(*arguments, code=2)
    expect(checks["all-reduce"], "fail", "rank 1: no luck")
    expect(checks["train step"], "fail", "Test CPU", "no luck")


MARK = "[\u2713!\u2717\u2013]"


def test_the_first_line_is_the_verdict_and_quiet_shows_only_problems(
    cli: Cli, machine: Machine, tmp_path: Path
) -> None:
    usual, everything = cli("doctor").out, cli("doctor", "-v").out
    assert re.match(r"Ready to train on the CPU \(\d+ cores, bf16\).* ssdctl demo\n", usual)
    assert not re.search(rf"^  {MARK} packages ", usual, re.MULTILINE)
    assert re.search(r"^  \u2713 packages ", everything, re.MULTILINE)
    assert cli("doctor", "-q") == Result(0, "", "")
    options = ("--data", tmp_path / "none")
    assert "1 warning" in cli("doctor", *options).out.splitlines()[0]
    assert cli("doctor", "-q", *options).out.splitlines()[0].startswith("  ! dataset")
    broken = cli("doctor", "--set", "train.device=hpu").expect(2)
    assert broken.out.startswith("Not ready: hpu")


def test_no_secrets(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").symlink_to(tmp_path / "volume")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOGNAME", "alice")
    for home in ("home", "volume"):
        data = tmp_path / home / "coco"
        checks = machine.doctor("--data", data, "--store", "/scratch/alice/store")
        assert checks["dataset"]["detail"].startswith("~/coco: no such")
    monkeypatch.setenv("HTTPS_PROXY", "http://bob:hush@127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "carol:quiet@127.0.0.1:1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/scratch/alice/ca.pem")
    policy = network.RETRY_POLICY._replace(connect_s=0.5, stall_s=1)
    monkeypatch.setattr(network, "RETRY_POLICY", policy)
    output = json.dumps(machine.doctor("--network", code=2))
    assert not re.search("hush|quiet|bob|carol|alice", output)
    assert "HTTPS_PROXY=http://***@127.0.0.1:1" in output
    assert "/scratch/$USER/ca.pem" in output


def test_commands_of_the_output_can_be_typed(
    cli: Cli, machine: Machine, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HOME", str(tmp_path / "home")), ("LOGNAME", "alice"), ("USER", "alice")):
        monkeypatch.setenv(name, value)
    folder = shutil.copytree(dataset, tmp_path / "home/my photos/alice")
    remedy = machine.doctor("--data", folder)["store"]["remedy"]
    verdict = cli("doctor", "--data", folder).expect(0).out.splitlines()[0]
    for command in (remedy, verdict.partition("Try: ")[2]):
        echo = ["/bin/sh", "-c", f"printf '%s\n' {command}"]
        words = subprocess.run(echo, capture_output=True, text=True, check=True).stdout
        assert str(folder) in words.splitlines()
        assert not re.search(f"alice|{tmp_path}", command)
