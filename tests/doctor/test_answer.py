"""`ssdctl doctor` as users type it: on this machine for real, and what its answer looks like."""

from __future__ import annotations

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doctor.machines import Ask, Cli, Machine, state

from ssdctl.cli.main import main
from ssdctl.doctor import network


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
    found = {c["name"]: c for c in checks}
    assert {"python", "torch", "cores", "dataset", "mpirun"} <= found.keys()
    assert re.search(r"write [\d,]+ MB/s, read [\d,]+ MB/s", found["disk rate"]["detail"])
    assert state(found["all-reduce"])[0] == "ok"
    assert re.search(r"two ranks over gloo: 4 MB in [\d.]+ ms", found["all-reduce"]["detail"])
    assert re.match(r"--device auto is \w+: .*fp32|bf16", found["train step"]["detail"])
    flags = Path("/proc/cpuinfo").read_text()
    is_native = re.search(r"avx512_bf16|amx_bf16|\bbf16\b", flags) is not None
    assert ("bf16 native" in found["cpu"]["detail"]) == is_native
    assert "self-test: two ranks" in done.stderr
    assert sorted(shapes.rglob("*")) == before


def test_text_pastes_well(cli: Cli, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = cli("doctor").out
    lines = wide.splitlines()
    headings = [line for line in lines if re.fullmatch(r"[A-Z]\S+", line)]
    assert headings == ["Python", "Devices", "Machine", "Launchers", "Data"]
    starts = {len(m[0]) for line in lines if (m := re.match(r"  (ok|warn|fail) +\S.*?  +", line))}
    assert len(starts) == 1, "the details stand in one column"
    (column,) = starts
    further = [line for line in lines if line.startswith(" " * 8)]
    assert {len(line) - len(line.lstrip()) for line in further} <= {column, column + 3}
    assert "\033" not in wide
    states = [m[1] for line in lines if (m := re.match(r"  (ok|warn|fail) ", line))]
    warnings = states.count("warn")
    assert lines[-1].startswith(f"{states.count('ok')} ok, {warnings} warning")
    assert lines[-1].endswith(", 0 failures")
    monkeypatch.setenv("COLUMNS", "40")
    narrow = cli("doctor").out.splitlines()
    assert not [line for line in narrow if line.endswith("-")], "words are whole"
    long = [line for line in narrow if len(line) > 40]
    assert all(" " not in line.strip(" ->") for line in long), "only what cannot be broken"


def test_colours_on_a_terminal_alone(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def out() -> str:
        terminal = Terminal()
        with contextlib.redirect_stdout(terminal), pytest.raises(SystemExit):
            main(["doctor"])
        return terminal.getvalue()

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert "\033[32mok" in out()
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in out()


def test_no_secrets(
    ask: Ask, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LOGNAME", "alice")
    _, checks = ask("--data", tmp_path / "home" / "coco", "--store", "/scratch/alice/store")
    assert checks["dataset"]["detail"].startswith("~/coco: no such")
    monkeypatch.setenv("HTTPS_PROXY", "http://bob:hush@127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "carol:quiet@127.0.0.1:1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/scratch/alice/ca.pem")
    monkeypatch.setattr(network, "PATIENCE", network.PATIENCE._replace(connect_s=0.5, stall_s=1))
    code, checks = ask("--network")
    assert code == 2
    said = json.dumps(checks)
    assert not re.search("hush|quiet|bob|carol|alice", said)
    assert "HTTPS_PROXY=http://***@127.0.0.1:1" in said
    assert "/scratch/$USER/ca.pem" in said
