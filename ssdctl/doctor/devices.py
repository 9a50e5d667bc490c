"""CPU, GPUs and TPUs, and the arithmetic that each can do. Gaudi cards: gaudi.py."""

from __future__ import annotations

import importlib.util
import shutil
from collections import Counter
from concurrent.futures import Future
from typing import Any

from ssdctl.config import Config
from ssdctl.doctor.check import FAIL, OK, WARN, CheckResult, absent
from ssdctl.doctor.hardware import Hardware
from ssdctl.doctor.subprocess_probe import DRIVER_S, ProbeOutput, ProbeRunner
from ssdctl.runtime.packages import package_version

CPU_REMEDY = "--device cpu trains without it"
NATIVE_BF16, TENSOR_CORES = (8, 0), (7, 0)


def check_cpu(torch: Future[ProbeOutput]) -> list[CheckResult]:
    """Return the results of the torch probe for the CPU."""
    return _cpu(torch.result().facts())


def check_gpus(
    config: Config, runner: ProbeRunner, pci: Hardware, torch: Future[ProbeOutput]
) -> list[CheckResult]:
    """Query NVIDIA's driver while torch is being imported, then check what torch detects."""
    driver = _query_nvidia(runner)
    return _cuda(torch.result(), driver, pci, config.train.device)


def _cpu(facts: dict[str, Any]) -> list[CheckResult]:
    if "cpu" not in facts:
        return []
    cpu = facts["cpu"]
    native = "bf16 native" if cpu["has_native_bf16"] else "bf16 works but slowly: prefer --fp32"
    compiles = CheckResult(
        "cpu compile", OK, "torch.compile has its C++ compiler and Python's headers"
    )
    if cpu["compile"]:
        remedy = "apt-get install g++ python3-dev, for --execution compile"
        compiles = CheckResult("cpu compile", WARN, cpu["compile"][0], remedy)
    return [CheckResult("cpu", OK, f"{cpu['label']}; fp32, {native}; no fp16"), compiles]


# NVIDIA


def _query_nvidia(runner: ProbeRunner) -> ProbeOutput:
    """Run nvidia-smi for the driver's version, one line per GPU."""
    if shutil.which("nvidia-smi") is None:
        return ProbeOutput("", "nvidia-smi is not on PATH")
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return runner.run(argv, DRIVER_S)


def _cuda(torch: ProbeOutput, driver: ProbeOutput, pci: Hardware, wanted: str) -> list[CheckResult]:
    facts = torch.facts()
    versions = sorted(set(driver.out.split())) if not driver.problem else []
    gpus = facts.get("gpus", [])
    if gpus:
        return [_usable_gpus(gpus, facts, versions), *_gpu_arithmetic(gpus, facts)]
    reason = facts.get("gpu_problem") or "torch could not be queried"
    died = "cuda_build" in facts and torch.problem  # while it looked for GPUs
    if died:
        reason = f"looking for GPUs: {torch.problem}"
    if not pci.num_nvidia and not versions and not died:
        is_wanted = wanted == "cuda"
        detail = f"no GPU: {reason}" if is_wanted else "no GPU"
        return [absent("cuda", detail, CPU_REMEDY, is_wanted=is_wanted)]
    # A card that torch cannot use: `--device auto` would silently train on the CPU.
    num_gpus = pci.num_nvidia or len(driver.out.split())
    gpus_text = f"{num_gpus} GPU(s)" if num_gpus else "GPUs, if any"
    driver_text = f"driver {', '.join(versions)}" if versions else f"driver: {driver.problem}"
    remedy = "nvidia-smi must list the card: install or reload NVIDIA's driver"
    if versions:
        remedy = "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for torch's CUDA"
    if "cuda_build" in facts and facts["cuda_build"] is None:
        remedy = "install a torch that is built for CUDA: pip install --force-reinstall torch"
    state = FAIL if wanted == "cuda" else WARN
    return [
        CheckResult(
            "cuda", state, f"{gpus_text}, not usable by torch: {reason}; {driver_text}", remedy
        )
    ]


def _usable_gpus(
    gpus: list[dict[str, Any]], facts: dict[str, Any], versions: list[str]
) -> CheckResult:
    names = Counter(
        f"{g['name']} ({g['memory_bytes'] / 2**30:.0f} GiB, compute "
        f"{g['capability'][0]}.{g['capability'][1]})"
        for g in gpus
    )
    cards = ", ".join(f"{count} x {name}" for name, count in names.items())
    driver = f", driver {', '.join(versions)}" if versions else ""
    detail = f"{cards}; torch's CUDA {facts['cuda_build']}{driver}"
    if not all(g["has_kernels"] for g in gpus):
        remedy = f"install a torch built for them (an older one for old cards); {CPU_REMEDY}"
        return CheckResult("cuda", FAIL, f"{detail}; this torch has no kernels for them", remedy)
    return CheckResult("cuda", OK, detail)


def _gpu_arithmetic(gpus: list[dict[str, Any]], facts: dict[str, Any]) -> list[CheckResult]:
    least = min(tuple(g["capability"]) for g in gpus)
    detail = "fp32, fp16 and bf16 native"
    if least < NATIVE_BF16:
        detail = "fp32, fp16; no native bf16 below compute 8.0"
    if least < TENSOR_CORES:
        detail = "fp32; fp16 only saves memory: no tensor cores below compute 7.0"
    results = [CheckResult("cuda precision", OK, detail)]
    if facts.get("gpu_compile"):
        remedy = "pip install triton; apt-get install g++ python3-dev"
        results.append(CheckResult("cuda compile", WARN, facts["gpu_compile"][0], remedy))
    return results


# TPU


def check_tpus(config: Config, runner: ProbeRunner) -> list[CheckResult]:
    """Check that torch_xla matches torch, and which devices it detects."""
    device = config.train.device
    if importlib.util.find_spec("torch_xla") is None:
        remedy = "pip install torch_xla, in the version of the installed torch"
        return [absent("tpu", "no torch_xla", remedy, is_wanted=device == "xla")]
    full = {name: package_version(name) or "unknown" for name in ("torch", "torch_xla")}
    versions = {name: ".".join(version.split(".")[:2]) for name, version in full.items()}
    packages = f"torch_xla {versions['torch_xla']} with torch {versions['torch']}"
    if len(set(versions.values())) > 1:
        remedy = f"pip install 'torch=={versions['torch_xla']}.*'"
        return [
            CheckResult("tpu", FAIL if device == "xla" else WARN, f"{packages}: no match", remedy)
        ]
    code = (
        "import torch_xla.runtime as r; "
        "print(r.global_runtime_device_count(), 'x', r.device_type())"
    )
    answer = runner.run_python(code)
    if answer.problem:
        remedy = "PJRT_DEVICE names the hardware (TPU); one process at a time can hold it"
        state = FAIL if device == "xla" else WARN
        return [CheckResult("tpu", state, f"{packages}: {answer.problem}", remedy)]
    lines = answer.out.strip().splitlines() or ["?"]
    return [CheckResult("tpu", OK, f"{lines[-1]}, {packages}; fp32, bf16 native")]
