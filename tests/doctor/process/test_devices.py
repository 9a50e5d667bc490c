"""CPUs, GPUs, Gaudi cards and TPUs, and the software that drives them."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from doctor.machines import RECORDED, STANDIN, Machine, RunDoctor, state

from ssdctl.runtime import hardware

GPUS = """
import sys
if ['ssdctl.doctor.probes', 'torch'] == sys.orig_argv[4:6]:
    import torch, types
    torch.version.cuda = '13.0'
    torch.cuda.init = lambda: None
    torch.cuda.device_count = lambda: 2
    torch.cuda.get_arch_list = lambda: ['sm_80', 'sm_90', 'compute_120']
    torch.cuda.get_device_capability = lambda index: (8, 6)
    torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(
        name='Test GPU', total_memory=80 * 2**30, major=8, minor=6)
"""
# What `nvidia-smi -q -x` says of each card, as far as it is used.
CARD = """<gpu><mig_mode><current_mig>{mig}</current_mig></mig_mode>
<fabric><state>{fabric}</state></fabric>
<fb_memory_usage><total>81559 MiB</total><used>{used} MiB</used></fb_memory_usage>
<ecc_errors><volatile><sram_uncorrectable_parity>0</sram_uncorrectable_parity>
<dram_uncorrectable>{ecc}</dram_uncorrectable></volatile></ecc_errors>
<remapped_rows><remapped_row_pending>{pending}</remapped_row_pending>
<remapped_row_failure>{failure}</remapped_row_failure></remapped_rows></gpu>"""
HEALTHY = {"mig": "Disabled", "fabric": "N/A", "used": "4", "ecc": "0", "pending": "No",
           "failure": "No"}  # fmt: skip
GPU = {"name": "Test", "memory_bytes": 2**34, "capability": [9, 0], "has_kernels": True}


def nvidia_smi(machine: Machine, *cards: dict[str, str], driver: str = "580.65.06") -> None:
    text = "".join(CARD.format(**HEALTHY | card) for card in cards)
    document = f"<log><driver_version>{driver}</driver_version>{text}</log>"
    machine.put(machine.bin / "answer.xml", document)
    machine.program("nvidia-smi", f"[ \"$*\" = '-q -x' ] && exec /bin/cat {machine.bin}/answer.xml")


@pytest.mark.slow(in_ci=True)
def test_gpus_as_torch_sees_them(run_doctor: RunDoctor, machine: Machine) -> None:
    nvidia_smi(machine, {}, {})
    machine.put(machine.modules / "sitecustomize.py", GPUS)
    _, checks = run_doctor()
    expected = "2 x Test GPU (80 GiB, compute 8.6); torch's CUDA 13.0, driver 580.65.06"
    assert state(checks["cuda"]) == ("ok", expected)
    assert state(checks["cuda precision"]) == ("ok", "fp32, fp16 and bf16 native")
    assert checks["cuda state"]["state"] == "ok"


@pytest.mark.parametrize(
    ("capability", "has_kernels", "code", "precision"),
    [([7, 5], True, 0, "no native bf16"), ([6, 1], False, 2, "no tensor cores")],
)
def test_old_gpus(
    run_doctor: RunDoctor,
    machine: Machine,
    capability: list[int],
    has_kernels: bool,
    code: int,
    precision: str,
) -> None:
    gpu = GPU | {"capability": capability, "has_kernels": has_kernels}
    machine.torch_says(**RECORDED | {"gpus": [gpu], "gpu_compile": ["no triton"]})
    got, checks = run_doctor()
    assert got == code
    assert checks["cuda"]["state"] == ("ok" if has_kernels else "fail")
    assert precision in checks["cuda precision"]["detail"]
    assert state(checks["cuda compile"]) == ("warn", "no triton")


@pytest.mark.parametrize(
    ("wrong", "detail", "remedy"),
    [
        ({"ecc": "3"}, "GPU 1: uncorrectable ECC", "reset"),
        ({"pending": "Yes"}, "GPU 1: rows", "reset"),
        ({"failure": "Yes"}, "GPU 1: remapping", "replaced"),
        ({"mig": "Enabled"}, "GPU 1: partitioned (MIG)", "-mig 0"),
        ({"fabric": "In Progress"}, "GPU 1: NVSwitch fabric In Progress", "nvidia-fabricmanager"),
        ({"used": "40000"}, "GPU 1 (40,000 MiB): memory", "nvidia-smi"),
    ],
)
def test_the_state_of_gpus(
    run_doctor: RunDoctor, machine: Machine, wrong: dict[str, str], detail: str, remedy: str
) -> None:
    nvidia_smi(machine, {}, wrong)
    machine.torch_says(**RECORDED | {"gpus": [GPU, GPU]})
    code, checks = run_doctor()
    assert code == 0
    assert checks["cuda state"]["state"] == "warn"
    assert detail in checks["cuda state"]["detail"]
    assert remedy in checks["cuda state"]["remedy"]


def test_errors_in_the_kernels_log_and_an_old_driver(
    run_doctor: RunDoctor, machine: Machine
) -> None:
    nvidia_smi(machine, {}, driver="525.60.13")
    line = "[12.3] NVRM: Xid (PCI:0000:07:00): 79, pid=1, GPU has fallen off the bus."
    machine.program("dmesg", f"echo '{line}'; echo '{line}'")
    machine.torch_says(**RECORDED | {"gpus": [GPU], "cuda_build": "12.8"})
    _, checks = run_doctor()
    assert checks["cuda"]["state"] == "ok"
    assert checks["cuda xid"]["state"] == "warn"
    assert "Xid (PCI:0000:07:00): 79 (2 times)" in checks["cuda xid"]["detail"]
    machine.torch_says(**RECORDED | {"gpus": [GPU], "cuda_build": "13.0"})
    _, checks = run_doctor()
    assert checks["cuda"]["state"] == "warn"
    assert "needs driver 580.65" in checks["cuda"]["remedy"]


def test_a_gpu_that_torch_cannot_use(run_doctor: RunDoctor, machine: Machine) -> None:
    assert state(run_doctor()[1]["cuda"]) == ("absent", "no GPU")
    machine.card(hardware.NVIDIA, kind="0x030200")
    machine.card(hardware.NVIDIA, number=1, kind="0x040300")  # its sound
    machine.program("nvidia-smi", "echo 'cannot talk to the driver'; exit 9")
    code, checks = run_doctor()
    assert (code, checks["cuda"]["state"]) == (0, "warn")
    assert "1 GPU(s), not usable by torch: no driver" in checks["cuda"]["detail"]
    assert "driver: cannot talk to the driver" in checks["cuda"]["detail"]
    assert "install or reload" in checks["cuda"]["remedy"]
    assert run_doctor("--set", "train.device=cuda")[0] == 2
    machine.torch_says(**RECORDED | {"cuda_build": None})
    assert "built for CUDA" in run_doctor()[1]["cuda"]["remedy"]


def test_a_driver_that_kills_its_caller(run_doctor: RunDoctor, machine: Machine) -> None:
    reported = {"torch", "import_s", "has_gloo", "cpu", "cuda_build"}
    machine.torch_says("os.abort()", **{k: v for k, v in RECORDED.items() if k in reported})
    _, checks = run_doctor()
    states = [checks[name]["state"] for name in ("torch import", "cpu", "cuda")]
    assert states == ["ok", "ok", "warn"]
    assert "SIGABRT" in checks["cuda"]["detail"]


def gaudi(machine: Machine, monkeypatch: pytest.MonkeyPatch, *, name: str, driver: str) -> None:
    """Two cards with their driver's tool, and the bridge of release 1.22."""
    for number in range(2):
        machine.card(hardware.HABANA, number)
        accelerator = machine.sys / f"class/accel/accel{number}/device"
        machine.put(accelerator / "numa_node", str(number))
        machine.put(accelerator / "module_id", str(1 - number))
        machine.put(machine.sys / f"devices/system/node/node{number}/cpulist", f"{number}-{number}")
    down = "DOWN" if name == "HL-205" else "UP"
    machine.program(
        "hl-smi",
        f"[ $1 = -n ] && {{ echo 'port 0: UP'; echo 'port 11:   {down}'; exit; }}\n"
        f"echo '{name}, {driver}, 0000:00:00.0'; echo '{name}, {driver}, 0000:01:00.0'",
    )
    packages = machine.modules.parent / "packages"
    shutil.copytree(STANDIN / "habana_frameworks", packages / "habana_frameworks")
    machine.package(packages, "habana-torch-plugin", "1.22.1.6")
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", f"{machine.modules}:{packages}")


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
    assert state(checks["hpu ports"]) == ("ok", "4 up")
    nodes = "card 0: NUMA node 1 (CPU 1-1); card 1: NUMA node 0 (CPU 0-0)"
    assert state(checks["hpu cores"]) == ("ok", nodes)
    assert "bf16 native" in checks["hpu precision"]["detail"]
    assert "hpu batch" not in checks
    assert checks["mpirun"]["state"] == "warn", "launch --hpus needs it"
    hint = run_doctor("--set", "train.batch_size=128")[1]["hpu batch"]
    assert (hint["state"], hint["remedy"]) == ("ok", "--bs 120 or --bs 144")


def test_gaudi_releases_that_do_not_match(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi(machine, monkeypatch, name="HL-205", driver="1.20.1-ab12")
    _, checks = run_doctor()
    assert checks["hpu"]["state"] == "warn"
    assert "release 1.20" in checks["hpu"]["remedy"]
    assert "to 1.22" in checks["hpu"]["remedy"]
    assert "hpu batch" not in checks, "the first Gaudi does not care"
    ports = "down: 0000:00:00.0 port 11; 0000:01:00.0 port 11"
    assert state(checks["hpu ports"]) == ("warn", ports)
    assert checks["huge pages"]["state"] == "warn"
    assert "11,874 are recommended" in checks["huge pages"]["detail"]
    for part in ("sysctl.conf.bak", "vm.nr_hugepages = 11874", "sysctl -p", "mapping memory"):
        assert part in checks["huge pages"]["remedy"]


def test_a_gaudi_bridge_that_is_broken_or_without_a_card(
    run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaudi(machine, monkeypatch, name="HL-225", driver="1.22.0")
    core = machine.modules.parent / "packages" / "habana_frameworks" / "torch" / "core.py"
    machine.put(core, "raise OSError('libSynapse.so: cannot open')")
    _, checks = run_doctor()
    assert checks["hpu bridge"]["state"] == "warn"
    assert "libSynapse.so: cannot open" in checks["hpu bridge"]["detail"]
    assert run_doctor("--set", "train.device=hpu")[0] == 2
    shutil.rmtree(machine.sys / "bus")
    (machine.bin / "hl-smi").unlink()
    code, checks = run_doctor()
    assert code == 2
    assert "--device auto would choose it and fail" in checks["hpu"]["detail"]
    assert run_doctor("--set", "train.device=cpu")[0] == 0


def test_gaudi_cards_without_the_vendors_software(run_doctor: RunDoctor, machine: Machine) -> None:
    _, checks = run_doctor()
    assert [checks[name]["state"] for name in ("hpu", "huge pages")] == ["absent", "absent"]
    code, checks = run_doctor("--set", "train.device=hpu")
    assert (code, checks["hpu"]["state"]) == (2, "fail")
    machine.card(hardware.HABANA)
    machine.put(machine.sys / "module/habanalabs/version", "1.21.0-cc")
    _, checks = run_doctor()
    assert state(checks["hpu"]) == ("warn", "1 x Gaudi, driver 1.21.0-cc, bridge absent")
    assert "vendor's PyTorch image" in checks["hpu"]["remedy"]


def torch_xla(machine: Machine, runtime: str, **versions: str) -> None:
    packages = machine.modules.parent / "packages"
    shutil.rmtree(packages, ignore_errors=True)
    machine.put(packages / "torch_xla" / "__init__.py", "")
    machine.put(packages / "torch_xla" / "runtime.py", runtime)
    for name, version in versions.items():
        machine.package(packages, name, version)


def test_tpus(run_doctor: RunDoctor, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_doctor()[1]["tpu"]["state"] == "absent"
    for number in range(4):
        machine.card(hardware.GOOGLE, number, device="0x0063")
    check = run_doctor()[1]["tpu"]
    assert state(check) == ("warn", "4 x TPU v5e on the PCI bus; no torch_xla")
    assert "torch_xla[tpu]==2.9.*" in check["remedy"]
    assert "TorchTPU" in check["remedy"]
    packages = machine.modules.parent / "packages"
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setenv("PYTHONPATH", f"{machine.modules}:{packages}")
    versions: dict[str, Any] = {"torch": "2.9.1", "torch_xla": "2.9.0"}
    runtime = "def global_runtime_device_count(): return 4\ndef device_type(): return 'TPU'"
    torch_xla(machine, runtime, **versions)
    assert run_doctor()[1]["tpu"]["detail"].startswith("4 x TPU, 4 x TPU v5e")
    torch_xla(machine, "raise RuntimeError('chip is in use')", **versions)
    assert "chip is in use" in run_doctor()[1]["tpu"]["detail"]
    torch_xla(machine, runtime, **versions | {"torch_xla": "2.8.0"})
    check = run_doctor()[1]["tpu"]
    assert (check["state"], "torch==2.8" in check["remedy"]) == ("warn", True)
