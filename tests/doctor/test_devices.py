"""CPUs, GPUs, Gaudi cards and TPUs, and the software that drives them."""

from __future__ import annotations

import shutil

import pytest
from doctor.machines import RECORDED, STANDIN, Machine, RunDoctor, state

from ssdctl.doctor import hardware

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


@pytest.mark.slow(in_ci=True)
def test_gpus_as_torch_sees_them(run_doctor: RunDoctor, machine: Machine) -> None:
    machine.program("nvidia-smi", "echo 570.12; echo 570.12")
    machine.put(machine.modules / "sitecustomize.py", GPUS.replace("MAJOR", "8"))
    _, checks = run_doctor()
    expected = "2 x Test GPU (80 GiB, compute 8.6); torch's CUDA 13.0, driver 570.12"
    assert state(checks["cuda"]) == ("ok", expected)
    assert state(checks["cuda precision"]) == ("ok", "fp32, fp16 and bf16 native")


@pytest.mark.parametrize(
    ("capability", "has_kernels", "code", "arithmetic"),
    [([7, 5], True, 0, "no native bf16"), ([6, 1], False, 2, "no tensor cores")],
)
@pytest.mark.process
def test_old_gpus(
    run_doctor: RunDoctor,
    machine: Machine,
    capability: list[int],
    has_kernels: bool,
    code: int,
    arithmetic: str,
) -> None:
    gpu = {"name": "Old", "memory_bytes": 2**34, "capability": capability}
    facts = RECORDED | {"gpus": [gpu | {"has_kernels": has_kernels}], "gpu_compile": ["no triton"]}
    machine.torch_says(**facts)
    got, checks = run_doctor()
    assert got == code
    assert ("no kernels" in checks["cuda"]["detail"]) == (not has_kernels)
    assert arithmetic in checks["cuda precision"]["detail"]
    assert state(checks["cuda compile"]) == ("warn", "no triton")


@pytest.mark.process
def test_a_gpu_that_torch_cannot_use(run_doctor: RunDoctor, machine: Machine) -> None:
    assert state(run_doctor()[1]["cuda"]) == ("absent", "no GPU")
    machine.card(hardware.NVIDIA, kind="0x030200")
    machine.card(hardware.NVIDIA, number=1, kind="0x040300")  # its sound
    machine.program("nvidia-smi", "echo 'cannot talk to the driver'; exit 9")
    code, checks = run_doctor()
    assert code == 0
    assert checks["cuda"]["state"] == "warn"
    assert "1 GPU(s), not usable by torch: no driver" in checks["cuda"]["detail"]
    assert "cannot talk to the driver" in checks["cuda"]["detail"]
    assert "install or reload" in checks["cuda"]["remedy"]
    assert run_doctor("--set", "train.device=cuda")[0] == 2
    machine.torch_says(**RECORDED | {"cuda_build": None})
    assert "built for CUDA" in run_doctor()[1]["cuda"]["remedy"]


def test_a_driver_that_kills_its_caller(run_doctor: RunDoctor, machine: Machine) -> None:
    reported = {"torch", "import_s", "has_gloo", "cpu", "cuda_build"}
    machine.torch_says("os.abort()", **{k: v for k, v in RECORDED.items() if k in reported})
    _, checks = run_doctor()
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


@pytest.mark.process
def test_gaudi_cards(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi(machine, monkeypatch, name="HL-225", driver="1.22.0-ab12")
    machine.put(machine.proc / "meminfo", "HugePages_Total: 11874\nHugepagesize: 2048 kB")
    code, checks = run_doctor("--set", "train.batch_size=48")
    assert code == 0
    expected = "2 x HL-225, driver 1.22.0-ab12, bridge 1.22.1.6"
    assert state(checks["hpu"]) == ("ok", expected)
    assert state(checks["huge pages"]) == ("ok", "11,874 of 2048 kB")
    assert "bf16 native" in checks["hpu precision"]["detail"]
    assert "hpu batch" not in checks
    assert checks["mpirun"]["state"] == "warn", "launch --hpus needs it"
    hint = run_doctor("--set", "train.batch_size=128")[1]["hpu batch"]
    assert (hint["state"], hint["remedy"]) == ("ok", "--bs 120 or --bs 144")


@pytest.mark.process
def test_gaudi_releases_that_do_not_match(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi(machine, monkeypatch, name="HL-205", driver="1.20.1-ab12")
    _, checks = run_doctor()
    assert checks["hpu"]["state"] == "warn"
    assert "the releases do not match" in checks["hpu"]["detail"]
    assert "release 1.20" in checks["hpu"]["remedy"]
    assert "to 1.22" in checks["hpu"]["remedy"]
    assert "hpu batch" not in checks, "the first Gaudi does not care"
    assert checks["huge pages"]["state"] == "warn"
    for part in ("sysctl.conf.bak", "vm.nr_hugepages = 11874", "sysctl -p", "mapping memory"):
        assert part in checks["huge pages"]["remedy"]


@pytest.mark.process
def test_a_gaudi_bridge_that_is_broken_or_without_a_card(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi(machine, monkeypatch, name="HL-225", driver="1.22.0")
    core = machine.modules.parent / "packages" / "habana_frameworks" / "torch" / "core.py"
    machine.put(core, "raise OSError('libSynapse.so: cannot open')")
    _, checks = run_doctor()
    assert state(checks["hpu bridge"])[0] == "warn"
    assert "libSynapse.so: cannot open" in checks["hpu bridge"]["detail"]
    assert run_doctor("--set", "train.device=hpu")[0] == 2
    shutil.rmtree(machine.sys / "bus")
    (machine.bin / "hl-smi").unlink()
    code, checks = run_doctor()
    assert code == 2
    assert "--device auto would choose it and fail" in checks["hpu"]["detail"]
    assert run_doctor("--set", "train.device=cpu")[0] == 0


@pytest.mark.process
def test_gaudi_cards_without_the_vendors_software(run_doctor: RunDoctor, machine: Machine) -> None:
    assert state(run_doctor()[1]["hpu"]) == ("absent", "no Gaudi card, no bridge")
    assert "not needed" in run_doctor()[1]["huge pages"]["detail"]
    code, checks = run_doctor("--set", "train.device=hpu")
    assert (code, checks["hpu"]["state"]) == (2, "fail")
    machine.card(hardware.HABANA)
    machine.put(machine.sys / "module/habanalabs/version", "1.21.0-cc")
    _, checks = run_doctor()
    assert state(checks["hpu"]) == ("warn", "1 x Gaudi, driver 1.21.0-cc, bridge absent")
    assert "vendor's PyTorch image" in checks["hpu"]["remedy"]


@pytest.mark.process
def test_tpus(run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    packages = machine.modules.parent / "packages"
    runtime = "def global_runtime_device_count(): return 4\ndef device_type(): return 'TPU'"
    machine.put(packages / "torch_xla" / "__init__.py", "")
    machine.put(packages / "torch_xla" / "runtime.py", runtime)
    for name, version in (("torch", "2.9.1"), ("torch_xla", "2.8.0")):
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"
        machine.put(packages / f"{name}-{version}.dist-info" / "METADATA", metadata)
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", f"{machine.modules}:{packages}")
    check = run_doctor()[1]["tpu"]
    assert state(check) == ("warn", "torch_xla 2.8 with torch 2.9: no match")
    (packages / "torch_xla-2.8.0.dist-info").rename(packages / "torch_xla-2.9.0.dist-info")
    machine.put(
        packages / "torch_xla-2.9.0.dist-info" / "METADATA",
        "Metadata-Version: 2.1\nName: torch_xla\nVersion: 2.9.0",
    )
    assert run_doctor()[1]["tpu"]["detail"].startswith("4 x TPU, torch_xla 2.9")
    machine.put(packages / "torch_xla" / "runtime.py", "raise RuntimeError('chip is in use')")
    assert "chip is in use" in run_doctor()[1]["tpu"]["detail"]
