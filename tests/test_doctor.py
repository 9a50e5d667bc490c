"""`ssdctl doctor` as users type it, on machines made of small stand-ins: folders for sysfs, scripts
for other people's programs, a recorded answer of torch's probe where torch itself is not the point.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Result
from data.http_server import Reply, Server
from processes import is_alive

from ssdctl.cli.main import main
from ssdctl.data import sources
from ssdctl.data.sources import COCO2017, PinnedFile, Weights
from ssdctl.doctor import examine, hardware, network

Cli = Callable[..., Result]
STANDIN = Path(__file__).parent / "standin"
CPU = {"label": "Test CPU", "has_native_bf16": True, "compile": []}
RECORDED = {
    "torch": "2.9.0", "import_s": 1.5, "has_gloo": True, "cpu": CPU, "cuda_build": "12.8",
    "gpus": [], "gpu_problem": "no driver",
}  # fmt: skip


class Machine:
    """A machine of folders: /sys, /proc, a PATH, and what torch's probe says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sys, self.proc = folder / "sys", folder / "proc"
        self.bin, self.modules = folder / "bin", folder / "modules"
        for made in (self.sys, self.proc, self.bin, self.modules):
            made.mkdir(parents=True)
        self.put(self.proc / "meminfo", "MemTotal: 64000000 kB\nMemAvailable: 60000000 kB\n")
        monkeypatch.setattr(hardware, "SYS", self.sys)
        monkeypatch.setattr(hardware, "PROC", self.proc)
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("PYTHONPATH", str(self.modules))
        monkeypatch.setenv("TORCH_HOME", str(folder / "torch"))
        self.torch_says(**RECORDED)

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")

    def program(self, name: str, script: str) -> None:
        self.put(self.bin / name, f"#!/bin/sh\n{script}")
        (self.bin / name).chmod(0o755)

    def card(self, vendor: str, number: int = 0, kind: str = "0x120000") -> None:
        device = self.sys / f"bus/pci/devices/0000:{number:02}:00.0"
        self.put(device / "vendor", vendor)
        self.put(device / "class", kind)

    def torch_says(self, end: str = "os._exit(0)", **facts: Any) -> None:
        """Have torch's probe answer with these facts, at once, and end so."""
        code = f"""
            import os, sys
            if 'ssdctl.doctor.torch_probe' in sys.orig_argv:
                print({json.dumps(facts)!r}, flush=True)
                {end}
        """
        self.put(self.modules / "sitecustomize.py", re.sub("^ {12}", "", code, flags=re.M))

    def torch_is(self, code: str) -> None:
        """Put another torch before the real one."""
        (self.modules / "sitecustomize.py").unlink()
        self.put(self.modules / "torch" / "__init__.py", code)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path / "machine", monkeypatch)


@pytest.fixture
def ask(cli: Cli) -> Callable[..., tuple[int, dict[str, dict[str, str]]]]:
    """Run the doctor: its exit code, and the checks by name."""

    def run(*arguments: object) -> tuple[int, dict[str, dict[str, str]]]:
        result = cli("doctor", "--json", *arguments)
        assert result.code in (0, 2), result.err
        return result.code, {check["name"]: check for check in json.loads(result.out)}

    return run


Ask = Callable[..., tuple[int, dict[str, dict[str, str]]]]


def state(check: dict[str, str]) -> tuple[str, str]:
    return check["state"], check["detail"]


# The whole


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


# Python and torch


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("raise ImportError('libcudart.so.12: cannot open')", "libcudart.so.12: cannot open"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import time; time.sleep(60)", "no answer within 1 s"),
    ],
)
def test_a_broken_torch_leaves_the_rest(
    ask: Ask, machine: Machine, monkeypatch: pytest.MonkeyPatch, code: str, expected: str
) -> None:
    machine.torch_is(code)
    monkeypatch.setattr(examine, "IMPORT_S", 1.0)
    start = time.monotonic()
    code_, checks = ask()
    assert time.monotonic() - start < 20
    assert code_ == 2
    assert checks["torch import"]["state"] == "fail"
    assert expected in checks["torch import"]["detail"]
    assert "pip install" in checks["torch import"]["remedy"]
    assert checks["memory"]["state"] == "ok"


def test_a_torch_without_gloo(ask: Ask, machine: Machine) -> None:
    machine.torch_says(**RECORDED | {"has_gloo": False})
    check = ask()[1]["torch import"]
    assert state(check) == ("warn", "1.5 s; built without gloo")


def test_a_cpu_without_compiler_or_bf16(ask: Ask, machine: Machine) -> None:
    cpu = CPU | {"has_native_bf16": False, "compile": ["no C++ compiler"]}
    machine.torch_says(**RECORDED | {"cpu": cpu})
    _, checks = ask()
    assert "bf16 works but slowly" in checks["cpu"]["detail"]
    assert state(checks["cpu compile"]) == ("warn", "no C++ compiler")


def test_versions_are_judged_by_what_ssdctl_asks(
    ask: Ask, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(name: str, version: str) -> None:
        folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
        machine.put(folder / "METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")

    put("torch", "2.4.0")
    put("onnx", "1.2.0")
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    code, checks = ask()
    assert code == 2
    assert checks["torch"]["state"] == "fail"
    assert "2.4.0; ssdctl needs >=2.9" in checks["torch"]["detail"]
    assert checks["torch"]["remedy"].startswith("pip install 'torch>=2.9")
    assert state(checks["torchvision"])[0] == "warn", "it was made for another torch"
    assert any(n.startswith("extra ") and "onnx: 1.2.0" in c["detail"] for n, c in checks.items())
    monkeypatch.syspath_prepend(str(STANDIN))
    assert "vendor's image" in ask()[1]["torch"]["remedy"]


def test_an_extra_that_the_config_needs(ask: Ask, machine: Machine) -> None:
    if any(Path(p, "nvidia", "dali").is_dir() for p in sys.path):
        pytest.skip("nvidia-dali is installed here")
    code, checks = ask("--set", "train.pipeline=dali")
    assert code == 2
    assert state(checks["extra dali"])[0] == "fail"
    assert "ssdctl[dali]" in checks["extra dali"]["remedy"]


# Devices


GPUS = """
import sys
if 'ssdctl.doctor.torch_probe' in sys.orig_argv:
    import torch, types
    torch.version.cuda = '13.0'
    torch.cuda.init = lambda: None
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_arch_list = lambda: ['sm_80', 'sm_90', 'compute_120']
    torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(
        name='Test GPU', total_memory=80 * 2**30, major=MAJOR, minor=6)
"""


def test_gpus_as_torch_sees_them(ask: Ask, machine: Machine) -> None:
    machine.program("nvidia-smi", "echo 570.12; echo 570.12")
    machine.put(machine.modules / "sitecustomize.py", GPUS.replace("MAJOR", "8"))
    _, checks = ask()
    expected = "2 x Test GPU (80 GiB, compute 8.6); torch's CUDA 13.0, driver 570.12"
    assert state(checks["cuda"]) == ("ok", expected)
    assert state(checks["cuda precision"]) == ("ok", "fp32, fp16 and bf16 native")


@pytest.mark.parametrize(
    ("capability", "has_kernels", "code", "arithmetic"),
    [([7, 5], True, 0, "no native bf16"), ([6, 1], False, 2, "no tensor cores")],
)
def test_old_gpus(
    ask: Ask, machine: Machine, capability: list[int], has_kernels: bool, code: int, arithmetic: str
) -> None:
    gpu = {"name": "Old", "memory_bytes": 2**34, "capability": capability}
    facts = RECORDED | {"gpus": [gpu | {"has_kernels": has_kernels}], "gpu_compile": ["no triton"]}
    machine.torch_says(**facts)
    got, checks = ask()
    assert got == code
    assert ("no kernels" in checks["cuda"]["detail"]) == (not has_kernels)
    assert arithmetic in checks["cuda precision"]["detail"]
    assert state(checks["cuda compile"]) == ("warn", "no triton")


def test_a_gpu_that_torch_cannot_use(ask: Ask, machine: Machine) -> None:
    assert state(ask()[1]["cuda"]) == ("ok", "no GPU")
    machine.card(hardware.NVIDIA, kind="0x030200")
    machine.card(hardware.NVIDIA, number=1, kind="0x040300")  # its sound
    machine.program("nvidia-smi", "echo 'cannot talk to the driver'; exit 9")
    code, checks = ask()
    assert code == 0
    assert checks["cuda"]["state"] == "warn"
    assert "1 GPU(s), not usable by torch: no driver" in checks["cuda"]["detail"]
    assert "cannot talk to the driver" in checks["cuda"]["detail"]
    assert "install or reload" in checks["cuda"]["remedy"]
    assert ask("--set", "train.device=cuda")[0] == 2
    machine.torch_says(**RECORDED | {"cuda_build": None})
    assert "built for CUDA" in ask()[1]["cuda"]["remedy"]


def test_a_driver_that_kills_whoever_asks(ask: Ask, machine: Machine) -> None:
    told = {"torch", "import_s", "has_gloo", "cpu", "cuda_build"}
    machine.torch_says("os.abort()", **{k: v for k, v in RECORDED.items() if k in told})
    _, checks = ask()
    assert checks["torch import"]["state"] == "ok"
    assert checks["cpu"]["state"] == "ok"
    assert state(checks["cuda"])[0] == "warn"
    assert "SIGABRT" in checks["cuda"]["detail"]


def gaudi(machine: Machine, monkeypatch: pytest.MonkeyPatch, *, name: str, driver: str) -> None:
    """Two cards with their driver's tool, and the bridge of release 1.22."""
    for number in range(2):
        machine.card(hardware.HABANA, number)
    machine.program("hl-smi", f"echo '{name}, {driver}'; echo '{name}, {driver}'")
    packages = machine.modules.parent / "packages"
    shutil.copytree(STANDIN / "habana_frameworks", packages / "habana_frameworks")
    metadata = "Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: 1.22.1.6"
    machine.put(packages / "habana_torch_plugin-1.22.1.6.dist-info" / "METADATA", metadata)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", f"{machine.modules}:{packages}")


def test_gaudi_cards(ask: Ask, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    gaudi(machine, monkeypatch, name="HL-225", driver="1.22.0-ab12")
    machine.put(machine.proc / "meminfo", "HugePages_Total: 153600\nHugepagesize: 2048 kB")
    code, checks = ask("--set", "train.batch_size=48")
    assert code == 0
    expected = "2 x HL-225, driver 1.22.0-ab12, bridge 1.22.1.6"
    assert state(checks["hpu"]) == ("ok", expected)
    assert state(checks["huge pages"]) == ("ok", "153,600 of 2048 kB")
    assert "bf16 native" in checks["hpu precision"]["detail"]
    assert "hpu batch" not in checks
    assert checks["mpirun"]["state"] == "warn", "launch --hpus needs it"
    hint = ask("--set", "train.batch_size=128")[1]["hpu batch"]
    assert (hint["state"], hint["remedy"]) == ("ok", "--bs 120 or --bs 144")


def test_gaudi_releases_that_do_not_match(
    ask: Ask, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi(machine, monkeypatch, name="HL-205", driver="1.20.1-ab12")
    _, checks = ask()
    assert checks["hpu"]["state"] == "warn"
    assert "the releases do not match" in checks["hpu"]["detail"]
    assert "release 1.20" in checks["hpu"]["remedy"]
    assert "to 1.22" in checks["hpu"]["remedy"]
    assert "hpu batch" not in checks, "the first Gaudi does not care"
    assert checks["huge pages"]["state"] == "warn"
    for part in ("sysctl.conf.bak", "vm.nr_hugepages = 153600", "sysctl -p", "mapping memory"):
        assert part in checks["huge pages"]["remedy"]


def test_a_gaudi_bridge_that_is_broken_or_alone(
    ask: Ask, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi(machine, monkeypatch, name="HL-225", driver="1.22.0")
    core = machine.modules.parent / "packages" / "habana_frameworks" / "torch" / "core.py"
    machine.put(core, "raise OSError('libSynapse.so: cannot open')")
    _, checks = ask()
    assert state(checks["hpu bridge"])[0] == "warn"
    assert "libSynapse.so: cannot open" in checks["hpu bridge"]["detail"]
    assert ask("--set", "train.device=hpu")[0] == 2
    shutil.rmtree(machine.sys / "bus")
    (machine.bin / "hl-smi").unlink()
    code, checks = ask()
    assert code == 2
    assert "--device auto would choose it and fail" in checks["hpu"]["detail"]
    assert ask("--set", "train.device=cpu")[0] == 0


def test_gaudi_cards_without_the_vendors_software(ask: Ask, machine: Machine) -> None:
    assert state(ask()[1]["hpu"]) == ("ok", "no Gaudi card, no bridge")
    assert "not needed" in ask()[1]["huge pages"]["detail"]
    code, checks = ask("--set", "train.device=hpu")
    assert (code, checks["hpu"]["state"]) == (2, "fail")
    machine.card(hardware.HABANA)
    machine.put(machine.sys / "module/habanalabs/version", "1.21.0-cc")
    _, checks = ask()
    assert state(checks["hpu"]) == ("warn", "1 x Gaudi, driver 1.21.0-cc, bridge absent")
    assert "vendor's PyTorch image" in checks["hpu"]["remedy"]


def test_tpus(ask: Ask, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = machine.modules.parent / "packages"
    runtime = "def global_runtime_device_count(): return 4\ndef device_type(): return 'TPU'"
    machine.put(packages / "torch_xla" / "__init__.py", "")
    machine.put(packages / "torch_xla" / "runtime.py", runtime)
    for name, version in (("torch", "2.9.1"), ("torch_xla", "2.8.0")):
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"
        machine.put(packages / f"{name}-{version}.dist-info" / "METADATA", metadata)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", f"{machine.modules}:{packages}")
    check = ask()[1]["tpu"]
    assert state(check) == ("warn", "torch_xla 2.8 with torch 2.9: no match")
    (packages / "torch_xla-2.8.0.dist-info").rename(packages / "torch_xla-2.9.0.dist-info")
    machine.put(
        packages / "torch_xla-2.9.0.dist-info" / "METADATA",
        "Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0",
    )
    assert ask()[1]["tpu"]["detail"].startswith("4 x TPU, torch_xla 2.9")
    machine.put(packages / "torch_xla" / "runtime.py", "raise RuntimeError('chip is in use')")
    assert "chip is in use" in ask()[1]["tpu"]["detail"]


# The machine


def test_what_a_cgroup_grants(ask: Ask, machine: Machine) -> None:
    _, checks = ask()
    assert (checks["cores"]["state"], checks["memory"]["state"]) == ("ok", "ok")
    machine.put(machine.proc / "self/cgroup", "0::/pods/one")
    group = machine.sys / "fs/cgroup/pods"
    machine.put(group / "one/cpu.max", "max 100000")
    machine.put(group / "cpu.max", "50000 100000")
    machine.put(group / "one/memory.max", str(2**30))
    _, checks = ask()
    assert checks["cores"]["state"] == "warn"
    assert "the cgroup grants 0.5" in checks["cores"]["detail"]
    assert "--workers 1" in checks["cores"]["remedy"]
    assert checks["memory"]["state"] == "warn"
    assert "the cgroup grants 1.0 GiB" in checks["memory"]["detail"]


def test_what_an_older_cgroup_grants(ask: Ask, machine: Machine) -> None:
    machine.put(machine.proc / "self/cgroup", "5:cpu,cpuacct:/job\n3:memory:/other")
    machine.put(machine.sys / "fs/cgroup/cpu/other/cpu.cfs_quota_us", "1")
    machine.put(machine.sys / "fs/cgroup/cpu/other/cpu.cfs_period_us", "100000")
    machine.put(machine.sys / "fs/cgroup/cpu/job/cpu.cfs_quota_us", "25000")
    machine.put(machine.sys / "fs/cgroup/cpu/job/cpu.cfs_period_us", "100000")
    machine.put(machine.sys / "fs/cgroup/memory/other/memory.limit_in_bytes", str(2**63 - 4096))
    _, checks = ask()
    assert "the cgroup grants 0.25" in checks["cores"]["detail"]
    assert checks["memory"]["state"] == "ok"


def test_numa_nodes_and_physical_cores(ask: Ask, machine: Machine) -> None:
    for cpu in os.sched_getaffinity(0):
        topology = machine.sys / f"devices/system/cpu/cpu{cpu}/topology"
        machine.put(topology / "physical_package_id", "0")
        machine.put(topology / "core_id", "0")  # all threads of one core
    for node in range(3):
        machine.put(machine.sys / f"devices/system/node/node{node}/cpulist", "0")
    assert "1 physical on 1 socket(s), 3 NUMA node(s)" in ask()[1]["cores"]["detail"]


def test_a_low_limit_of_open_files(machine: Machine) -> None:
    command = shlex.join([sys.executable, "-m", "ssdctl", "doctor", "--json"])
    done = subprocess.run(
        ["/bin/bash", "-c", f"ulimit -S -n 300; ulimit -S -l 64; exec {command}"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert state(checks["open files"]) == ("warn", "limit 300")
    assert checks["open files"]["remedy"].startswith("ulimit -n")
    assert checks["locked memory"]["detail"].startswith("limit 0.1 MiB")


def test_memory_that_cannot_be_locked_for_rdma(ask: Ask, machine: Machine) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, hard))
    try:
        assert ask()[1]["locked memory"]["state"] == "ok"
        (machine.sys / "class/infiniband/mlx5_0").mkdir(parents=True)
        check = ask()[1]["locked memory"]
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
    assert check["state"] == "warn"
    assert "memlock" in check["remedy"]


def test_little_shared_memory_matters_where_cards_are(
    ask: Ask, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ssdctl.doctor import limits

    monkeypatch.setattr(limits, "SHM", Path("/proc"))  # a file system without any room
    assert ask()[1]["/dev/shm"]["state"] == "ok"
    machine.card(hardware.HABANA)
    check = ask()[1]["/dev/shm"]
    assert check["state"] == "warn"
    assert "--shm-size" in check["remedy"]


# Launchers


def test_launchers(ask: Ask, machine: Machine) -> None:
    code, checks = ask()
    assert code == 0
    for name in ("mpirun", "sbatch", "srun", "kubectl"):
        assert checks[name]["state"] == "ok"
        assert checks[name]["detail"].startswith("not found; for ")
    assert ask("--set", "launch.launcher=kubernetes")[1]["kubectl"]["state"] == "fail"
    machine.program("mpirun", "[ $1 = --version ] && echo 'mpirun (Open MPI) 5.0.3'")
    machine.program("sbatch", "[ $1 = --version ] && printf 'slurm \\033[1m23.02.6\\007'")
    machine.program("kubectl", "echo 'no config' >&2; exit 1")
    code, checks = ask()
    assert state(checks["mpirun"]) == ("ok", "mpirun (Open MPI) 5.0.3")
    assert state(checks["sbatch"]) == ("ok", "slurm  23.02.6"), "no escapes of others'"
    assert state(checks["kubectl"]) == ("warn", "does not answer: no config")
    machine.program("mpirun", "echo 'HYDRA build details: 4.1'")
    check = ask()[1]["mpirun"]
    assert check["state"] == "warn"
    assert "Open MPI" in check["remedy"]


def test_a_program_that_hangs_is_killed_with_its_children(
    ask: Ask, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from ssdctl.doctor import launchers

    monkeypatch.setattr(launchers, "VERSION_S", 0.5)
    machine.program("srun", f"/bin/sleep 60 & echo $! > {tmp_path}/child; wait")
    start = time.monotonic()
    assert state(ask()[1]["srun"]) == ("warn", "does not answer: no answer within 0.5 s")
    assert time.monotonic() - start < 20
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 5
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_what_was_asked(machine: Machine, tmp_path: Path, number: int) -> None:
    machine.program("srun", f"echo $$ > {tmp_path}/child; exec /bin/sleep 60")
    doctor = subprocess.Popen(
        [sys.executable, "-m", "ssdctl", "doctor"], stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "child").is_file() or not (tmp_path / "child").read_text().strip():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)
    doctor.send_signal(number)
    _, err = doctor.communicate(timeout=20)
    assert (doctor.returncode, err.splitlines()[0]) == (75, "error: stopped; nothing was changed")
    child = int((tmp_path / "child").read_text())
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)


# Data


def test_the_states_of_a_dataset(
    ask: Ask, cli: Cli, machine: Machine, shapes: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    assert ask("--data", data)[1]["dataset"]["state"] == "warn"
    assert "store" not in ask("--data", data)[1]
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    _, checks = ask("--data", data)
    assert state(checks["dataset"]) == ("ok", f"{data}: train and val")
    assert state(checks["store"]) == (
        "warn",
        f"{data}/prepared: train not prepared, val not prepared",
    )
    assert checks["store"]["remedy"] == f"ssdctl prepare --data {data}"
    assert cli("prepare", "--data", data).code == 0
    assert state(ask("--data", data)[1]["store"]) == ("ok", f"{data}/prepared: prepared, packed")
    annotations = data / "annotations" / "instances_val2017.json"
    annotations.write_text(annotations.read_text() + " ")
    assert "val stale" in ask("--data", data)[1]["store"]["detail"]
    next((data / "prepared").glob("images-train-*")).unlink()
    assert "train incomplete" in ask("--data", data)[1]["store"]["detail"]
    machine.put(data / "prepared" / "index-train.arrow", "no arrow")
    assert "train unreadable" in ask("--data", data)[1]["store"]["detail"]
    machine.put(data / "dataset.toml", "[train]\nimages = 3")
    code, checks = ask("--data", data)
    assert (code, checks["dataset"]["state"]) == (2, "fail")


def test_a_read_only_data_folder(machine: Machine, shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    data.chmod(0o555)
    doctor = [sys.executable, "-m", "ssdctl", "doctor", "--json", "--data", str(data)]
    write = [sys.executable, "-m", "ssdctl.doctor.disk_probe", str(data)]
    prefix: list[str] = []
    if os.geteuid() == 0:  # whom permissions do not stop: a mount does
        mount = f'mount --bind {data} {data} && mount -o remount,ro,bind {data} && exec "$@"'
        prefix = [
            "/usr/bin/unshare",
            "--mount",
            "/bin/sh",
            "-c",
            f"PATH=/usr/bin:/bin; {mount}",
            "-",
        ]
        if not Path(prefix[0]).exists() or subprocess.run([*prefix, "/bin/true"]).returncode:
            pytest.skip("cannot mount here")
    done = subprocess.run([*prefix, *doctor], capture_output=True, text=True, timeout=60)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["disk"]["state"] == "warn"
    assert f"{data} is read-only" in checks["disk"]["detail"]
    assert "--store DIR" in checks["disk"]["remedy"]
    tried = subprocess.run([*prefix, *write], capture_output=True, text=True, timeout=60)
    assert tried.returncode == 1
    assert tried.stderr.strip() in ("Read-only file system", "Permission denied")
    data.chmod(0o755)


def test_backbone_weights(
    ask: Ask, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"weights" * 100
    pin = hashlib.sha256(content).hexdigest()
    file = PinnedFile("tiny.pth", "http://127.0.0.1:1/tiny.pth", pin)
    monkeypatch.setattr(sources, "WEIGHTS", (Weights(file, "resnet34-imagenet-v1", ""),))
    cache = Path(os.environ["TORCH_HOME"]) / "hub" / "checkpoints"
    check = ask()[1]["weights"]
    assert state(check) == ("warn", f"resnet34-imagenet-v1: not in {cache}")
    assert check["remedy"] == "ssdctl fetch-weights resnet34-imagenet-v1"
    cache.mkdir(parents=True)
    (cache / "tiny.pth").write_bytes(content)
    expected = f"{cache}/tiny.pth, 700 bytes, SHA-256 verified"
    assert state(ask()[1]["weights"]) == ("ok", expected)
    (cache / "tiny.pth").write_bytes(content[1:])
    assert "not what was published" in ask()[1]["weights"]["detail"]
    assert ask("--set", "model.weights=none")[1]["weights"]["state"] == "ok"
    code, checks = ask("--set", "model.weights=resnet34-imagenet-v9")
    assert (code, checks["weights"]["state"]) == (2, "fail")


# Network


def test_the_download_hosts(ask: Ask, machine: Machine, server: Server) -> None:
    def of_size(num_bytes: int | None) -> Callable[..., Reply]:
        return lambda _: Reply(206, {"Content-Range": f"bytes 0-0/{num_bytes}"}, b"P")

    train, val = COCO2017["train"], COCO2017["val"]
    server.route("/train2017.zip", of_size(train.bytes))
    server.route("/val2017.zip", of_size(1000))
    server.route("/models/resnet34-b627a593.pth", of_size(87_319_819))
    code, checks = ask("--network", "--mirror", server.url)
    assert code == 2
    assert all(checks[n]["group"] == "Network" for n in ("proxies", "train", "weights"))
    host = server.url.removeprefix("http://")
    assert f"{host} has its {train.bytes:,} bytes" in checks["train"]["detail"]
    assert checks["val"]["state"] == "fail"
    assert f"has 1,000 bytes, expected are {val.bytes:,}" in checks["val"]["detail"]
    assert "answers 404" in checks["annotations"]["detail"]
    assert checks["weights"]["state"] == "ok"
    assert server.body_bytes < 1000, "a byte or a refusal each, no download"


def test_a_mirror_keeps_its_password(ask: Ask, machine: Machine, server: Server) -> None:
    train = COCO2017["train"]
    head = {"Content-Range": f"bytes 0-0/{train.bytes}"}
    server.route("/train2017.zip", lambda _: Reply(206, head, b"P"))
    mirror = server.url.replace("://", "://dave:mute@")
    _, checks = ask("--network", "--mirror", mirror)
    assert [checks[name]["state"] for name in ("train", "val")] == ["ok", "fail"]
    assert "://***@127.0.0.1" in checks["val"]["detail"]
    assert not re.search("dave|mute", json.dumps(checks))
    _, checks = ask("--network", "--mirror", f"{server.url}/?token=mute")
    assert "?***" in checks["val"]["detail"]
    assert "mute" not in json.dumps(checks)


def test_a_network_that_swallows_everything(
    ask: Ask, machine: Machine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.route("/train2017.zip", lambda _: Reply(head_pause_s=30))
    monkeypatch.setattr(network, "PATIENCE", network.PATIENCE._replace(read_s=0.5, stall_s=1))
    start = time.monotonic()
    code, checks = ask("--network", "--mirror", server.url, "--set", "model.weights=none")
    assert time.monotonic() - start < 20
    assert (code, checks["train"]["state"]) == (2, "fail")
    assert checks["train"]["remedy"]
    assert "weights" in checks
    assert checks["weights"]["group"] == "Data", "nothing to fetch"
