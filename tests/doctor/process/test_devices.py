"""CPUs, GPUs, Gaudi cards and TPUs, and the software that drives them."""

import json
import shutil

from doctor.machines import CPU, RECORDED, STANDIN, Machine, expect

from ssdctl.runtime import hardware

GPU = {"name": "Test", "memory_bytes": 2**34, "capability": [9, 0], "has_kernels": True}


def test_an_old_gpu_and_a_cpu_without_bf16(machine: Machine) -> None:
    machine.torch_says(gpus=[GPU | {"has_kernels": False}], cpu=CPU | {"has_native_bf16": False})
    checks = machine.doctor(code=2)
    expect(checks["cuda"], "fail", "no kernels")
    expect(checks["cpu"], "ok", "prefer --fp32")


def test_an_old_driver(machine: Machine) -> None:
    machine.program("nvidia-smi", "echo 525.60.13")
    machine.torch_says(gpus=[GPU], cuda_build="12.8")
    machine.expect("cuda", "ok")
    machine.torch_says(gpus=[GPU], cuda_build="13.0")
    machine.expect("cuda", "warn", "driver 580.65")


def test_a_gpu_that_torch_cannot_use(machine: Machine) -> None:
    machine.expect("cuda", "absent")
    machine.card(hardware.NVIDIA, kind="0x030200")
    machine.card(hardware.NVIDIA, number=1, kind="0x040300")  # its sound
    machine.program("nvidia-smi", "echo 'cannot talk to the driver'; exit 9")
    machine.expect("cuda", "warn", "1 GPU(s)", "no driver", "smi: cannot talk", "install")
    machine.doctor("--set", "train.device=cuda", code=2)
    machine.torch_says(cuda_build=None)
    machine.expect("cuda", "warn", "built for CUDA")
    reported = ("torch", "import_s", "has_gloo", "cpu", "cuda_build")
    facts = json.dumps({name: RECORDED[name] for name in reported})
    machine.probe_prints("torch", facts, "os.abort()")  # as a driver that kills its caller
    checks = machine.doctor()
    assert [checks[name]["state"] for name in ("torch import", "cpu")] == ["ok", "ok"]
    expect(checks["cuda"], "warn", "SIGABRT")


def gaudi(machine: Machine, *, name: str, driver: str) -> None:
    """Two cards with their driver's tool, and the bridge of release 1.22."""
    for number in range(2):
        machine.card(hardware.HABANA, number)
    machine.program("hl-smi", f"echo '{name}, {driver}'; echo '{name}, {driver}'")
    shutil.copytree(STANDIN / "habana_frameworks", machine.packages / "habana_frameworks")
    machine.package("habana-torch-plugin", "1.22.1.6")
    machine.use_packages()


def test_gaudi(machine: Machine) -> None:
    gaudi(machine, name="HL-225", driver="1.22.0-ab12")
    machine.put(machine.proc / "meminfo", "HugePages_Total: 11874\nHugepagesize: 2048 kB")
    checks = machine.doctor()
    expect(checks["hpu"], "ok", "2 x HL-225, driver 1.22.0-ab12, bridge 1.22.1.6")
    expect(checks["huge pages"], "ok", "11,874 of 2048 kB")


def test_gaudi_releases_that_do_not_match(machine: Machine) -> None:
    gaudi(machine, name="HL-205", driver="1.20.1-ab12")
    checks = machine.doctor()
    expect(checks["hpu"], "warn", "release 1.20", "to 1.22")
    words = ("sysctl.conf.bak", "vm.nr_hugepages = 11874", "sysctl -p", "mapping memory")
    expect(checks["huge pages"], "warn", "11,874 are recommended", *words)


def test_a_gaudi_bridge_that_is_broken_or_without_a_card(machine: Machine) -> None:
    gaudi(machine, name="HL-225", driver="1.22.0")
    core = machine.packages / "habana_frameworks" / "torch" / "core.py"
    machine.put(core, "raise OSError('libSynapse.so: cannot open')")
    machine.expect("hpu bridge", "warn", "libSynapse.so: cannot open")
    machine.doctor("--set", "train.device=hpu", code=2)
    shutil.rmtree(machine.sys / "bus")
    (machine.bin / "hl-smi").unlink()
    machine.expect("hpu", "fail", "--device auto")
    expect(machine.doctor("--set", "train.device=hpu", code=2)["hpu"], "fail", "hl-smi must list")
    machine.doctor("--set", "train.device=cpu")


def test_gaudi_cards_without_the_vendors_software(machine: Machine) -> None:
    checks = machine.doctor()
    expect(checks["hpu"], "absent")
    expect(checks["huge pages"], "absent")
    expect(machine.doctor("--set", "train.device=hpu", code=2)["hpu"], "fail")
    machine.card(hardware.HABANA)
    machine.put(machine.sys / "module/habanalabs/version", "1.21.0-cc")
    expected = "1 x Gaudi, driver 1.21.0-cc, bridge absent"
    machine.expect("hpu", "warn", expected, "vendor's PyTorch image")


def test_tpus(machine: Machine) -> None:
    runtime = "def global_runtime_device_count(): return 4\ndef device_type(): return 'TPU'"
    machine.expect("tpu", "absent")
    for number in range(4):
        machine.card(hardware.GOOGLE, number, device="0x0063")
    machine.expect("tpu", "warn", "4 x TPU v5e", "pip install torch_tpu")
    machine.use_packages()
    for code, version, state, text in (
        (runtime, "2.9.0", "ok", "4 x TPU, 4 x TPU v5e"),
        ("raise RuntimeError('chip is in use')", "2.9.0", "warn", "chip is in use"),
    ):
        shutil.rmtree(machine.packages, ignore_errors=True)
        machine.put(machine.packages / "torch_xla" / "__init__.py", "")
        machine.put(machine.packages / "torch_xla" / "runtime.py", code)
        machine.package("torch", "2.9.1")
        machine.package("torch_xla", version)
        machine.expect("tpu", state, text)
