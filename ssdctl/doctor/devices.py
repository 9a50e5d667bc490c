"""Check the CPU, NVIDIA's GPUs, Gaudi cards and TPUs, and the precisions of each."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections import Counter
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple
from xml.etree import ElementTree as Xml

from ssdctl.config import Config
from ssdctl.doctor.check import ABSENT, DRIVER_S, Check, ProgramOutput, Programs, absent, bad, ok
from ssdctl.runtime import hardware
from ssdctl.runtime.hardware import TPU_V2_OR_V3, TPUS, Hardware
from ssdctl.runtime.packages import package_version
from ssdctl.runtime.system import read_table, read_text
from ssdctl.runtime.threads import run_in_daemon_thread

CPU_REMEDY = "--device cpu trains without it"
NATIVE_BF16, TENSOR_CORES = (8, 0), (7, 0)
# The oldest driver for a torch of this CUDA, by NVIDIA's notes on minor-version compatibility.
OLDEST_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
USED_BY_OTHERS = 0.05  # fraction of a GPU's memory
XID = re.compile(r"NVRM: Xid \(PCI:[^)]*\): \d+")
BRIDGE, BRIDGE_PACKAGE = "habana_frameworks", "habana-torch-plugin"
IMAGE = "run in the vendor's PyTorch image for Gaudi: its torch and bridge match"
GAUDI2 = re.compile(r"HL-2[2-9]")  # HL-225 and similar; HL-20x is the first Gaudi, HL-3xx the third
GAUDI2_BATCH = 24
# Pages of 2 MiB. Voyager's pods get 95,000 MiB for eight cards; the 153,600 pages of Habana's
# TensorFlow guide also hold that framework's dataset cache, which ssdctl does not have.
HUGE_PAGES_PER_CARD = 5_937
SUCCESSOR = "TorchTPU, Google's announced successor of torch_xla, is not supported yet"


def check_cpu(torch: Future[ProgramOutput]) -> list[Check]:
    """Return the results of the torch probe for the CPU."""
    cpu = torch.result().facts().get("cpu")
    if cpu is None:
        return []
    native = "bf16 native" if cpu["has_native_bf16"] else "bf16 works but slowly: prefer --fp32"
    compiles = ok("cpu compile", "torch.compile has its C++ compiler and Python's headers")
    if cpu["compile"]:
        remedy = "apt-get install g++ python3-dev, for --execution compile"
        compiles = bad("cpu compile", cpu["compile"][0], remedy)
    return [ok("cpu", f"{cpu['label']}; fp32, {native}; no fp16"), compiles]


def check_gpus(
    config: Config, programs: Programs, pci: Hardware, torch: Future[ProgramOutput]
) -> list[Check]:
    """Query NVIDIA's driver while torch is being imported, then check what torch detects."""
    problem, state = "nvidia-smi is not on PATH", Xml.Element("none")
    if shutil.which("nvidia-smi") is not None:
        answer = programs.run(["nvidia-smi", "-q", "-x"], DRIVER_S)
        problem = answer.problem
        if not problem:
            try:
                state = Xml.fromstring(answer.out)
            except Xml.ParseError as error:
                problem = f"nvidia-smi's answer cannot be read: {error}"
    facts, is_wanted = torch.result().facts(), config.train.device == "cuda"
    version, num_gpus = state.findtext("driver_version", ""), len(state.findall("gpu"))
    if facts.get("gpus"):
        results = _usable_gpus(facts, version)
        return [*results, *_gpu_states(state), *_xids(programs)]
    reason = facts.get("gpu_problem") or "torch could not be queried"
    died = "cuda_build" in facts and torch.result().problem  # while it looked for GPUs
    if died:
        reason = f"looking for GPUs: {died}"
    if not pci.num_nvidia and not version and not died:
        detail = f"no GPU: {reason}" if is_wanted else "no GPU"
        return [absent("cuda", detail, CPU_REMEDY, is_wanted=is_wanted)]
    # A card that torch cannot use: `--device auto` would silently train on the CPU.
    num_gpus = pci.num_nvidia or num_gpus
    detail = f"{num_gpus} GPU(s)" if num_gpus else "GPUs, if any"
    detail += f", not usable by torch: {reason}; driver {version or f': {problem}'}"
    remedy = "nvidia-smi must list the card: install or reload NVIDIA's driver"
    if version:
        remedy = "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for torch's CUDA"
    if too_old := _too_old(version, facts.get("cuda_build")):
        remedy = too_old
    if "cuda_build" in facts and facts["cuda_build"] is None:
        remedy = "install a torch that is built for CUDA: pip install --force-reinstall torch"
    return [bad("cuda", detail.replace("driver :", "driver:"), remedy, is_wanted=is_wanted)]


def _too_old(driver: str, cuda: str | None) -> str:
    """Return what to do about a driver that is older than torch's CUDA needs; else nothing."""
    needed = OLDEST_DRIVER.get(int(cuda.partition(".")[0])) if cuda else None
    numbers = re.match(r"(\d+)\.(\d+)", driver)
    if needed is None or numbers is None or (int(numbers[1]), int(numbers[2])) >= needed:
        return ""
    return f"torch's CUDA {cuda} needs driver {needed[0]}.{needed[1]} or newer: update it"


def _usable_gpus(facts: dict[str, Any], driver: str) -> list[Check]:
    gpus = facts["gpus"]
    names = Counter(
        f"{g['name']} ({g['memory_bytes'] / 2**30:.0f} GiB, compute "
        f"{g['capability'][0]}.{g['capability'][1]})"
        for g in gpus
    )
    detail = ", ".join(f"{count} x {name}" for name, count in names.items())
    detail += f"; torch's CUDA {facts['cuda_build']}" + (f", driver {driver}" if driver else "")
    usable = ok("cuda", detail)
    if not all(g["has_kernels"] for g in gpus):
        remedy = f"install a torch built for them (an older one for old cards); {CPU_REMEDY}"
        detail += "; this torch has no kernels for them"
        usable = bad("cuda", detail, remedy, is_wanted=True)
    elif too_old := _too_old(driver, facts["cuda_build"]):
        usable = bad("cuda", detail, too_old)
    least = min(tuple(g["capability"]) for g in gpus)
    precision = "fp32, fp16 and bf16 native"
    if least < NATIVE_BF16:
        precision = "fp32, fp16; no native bf16 below compute 8.0"
    if least < TENSOR_CORES:
        precision = "fp32; fp16 only saves memory: no tensor cores below compute 7.0"
    results = [usable, ok("cuda precision", precision)]
    if facts.get("gpu_compile"):
        remedy = "pip install triton; apt-get install g++ python3-dev"
        results.append(bad("cuda compile", facts["gpu_compile"][0], remedy))
    return results


def _gpu_states(state: Xml.Element) -> list[Check]:
    """Return what is wrong with the GPUs by NVIDIA's driver: memory, partitions, NVSwitch."""
    wrong: dict[str, list[str]] = {}
    gpus = state.findall("gpu")
    for number, gpu in enumerate(gpus):

        def says(path: str, gpu: Xml.Element = gpu) -> str:
            return (gpu.findtext(path) or "").strip()

        errors = gpu.find("ecc_errors/volatile")
        counts = [e.text or "" for e in errors or () if "uncorrectable" in e.tag]
        if any(count.isdigit() and int(count) for count in counts):
            wrong.setdefault("uncorrectable ECC errors", []).append(f"{number}")
        if "Yes" in (
            says("remapped_rows/remapped_row_pending"),
            says("retired_pages/pending_retirement"),
        ):
            wrong.setdefault("rows wait to be remapped", []).append(f"{number}")
        if says("remapped_rows/remapped_row_failure") == "Yes":
            wrong.setdefault("remapping of rows failed", []).append(f"{number}")
        if says("mig_mode/current_mig") == "Enabled":
            wrong.setdefault("partitioned (MIG)", []).append(f"{number}")
        if says("fabric/state") not in ("", "N/A", "Completed"):
            wrong.setdefault(f"NVSwitch fabric {says('fabric/state')}", []).append(f"{number}")
        used, total = (_mebibytes(says(f"fb_memory_usage/{name}")) for name in ("used", "total"))
        if total and used / total > USED_BY_OTHERS:
            wrong.setdefault("memory used by other programs", []).append(f"{number} ({used:,} MiB)")
    remedies = {
        "uncorrectable": "reset the card (nvidia-smi -r) or reboot; replace it if they come again",
        "rows": "reset the card (nvidia-smi -r) or reboot",
        "remapping": "the card's memory is worn out: have it replaced",
        "partitioned": "a rank takes one partition: nvidia-smi -mig 0 joins them",
        "NVSwitch": "NCCL cannot start: check the service nvidia-fabricmanager and its version",
        "memory": "nvidia-smi lists the programs; --bs auto fits what is left",
    }  # fmt: skip
    if not wrong:
        return [ok("cuda state", "no ECC error, nothing else uses them")] if gpus else []
    return [
        bad("cuda state", f"GPU {', '.join(numbers)}: {what}", remedies[what.split()[0]])
        for what, numbers in wrong.items()
    ]


def _mebibytes(text: str) -> int:
    number = text.partition(" ")[0]
    return int(number) if number.isdigit() else 0


def _xids(programs: Programs) -> list[Check]:
    """Return the errors that the driver wrote into the kernel's log, if that can be read."""
    found = Counter(XID.findall(programs.run(["dmesg"], DRIVER_S).out))
    if not found:
        return []
    detail = ", ".join(f"{text} ({count} times)" for text, count in found.items())
    return [bad("cuda xid", detail, "docs.nvidia.com/deploy/xid-errors says what each code means")]


class Driver(NamedTuple):
    """What the driver's own tool reports, or the kernel if the tool is absent."""

    cards: list[str]  # names
    addresses: list[str]  # on the PCI bus
    version: str
    problem: str


def check_gaudi(config: Config, programs: Programs, pci: Hardware) -> list[Check]:
    """Query hl-smi, then import the bridge in a subprocess."""
    driver, device = _query_driver(programs), config.train.device
    bridge = None
    if importlib.util.find_spec(BRIDGE) is not None:
        bridge = package_version(BRIDGE_PACKAGE) or "unknown"
    num_cards = len(driver.cards) or pci.num_gaudi
    pages = _huge_pages(num_cards)
    if not num_cards and bridge is None:
        return [absent("hpu", "no Gaudi card, no bridge", IMAGE, is_wanted=device == "hpu"), pages]
    if not num_cards:
        detail = f"bridge {bridge}, but no card: {driver.problem}"
        if device == "auto":  # chosen by the bridge
            detail += "; --device auto would choose it and fail"
        remedy = "hl-smi must list the cards: load the driver habanalabs; or --device cpu"
        return [bad("hpu", detail, remedy, is_wanted=device in ("auto", "hpu")), pages]
    names = Counter(driver.cards) or {"Gaudi": num_cards}
    detail = ", ".join(f"{number} x {name}" for name, number in names.items())
    detail += f", driver {driver.version or 'unknown'}, bridge {bridge or 'absent'}"
    results = [*_ports(programs, driver), *_numa_map(), pages]
    if bridge is None:
        return [bad("hpu", detail, IMAGE, is_wanted=device == "hpu"), *results]
    cards = [_releases(detail, driver, bridge)]
    answer = programs.run_python(f"import {BRIDGE}.torch.core")
    if answer.problem:
        detail = f"cannot be imported: {answer.problem}"
        cards.append(bad("hpu bridge", detail, IMAGE, is_wanted=device == "hpu"))
    cards.append(ok("hpu precision", "fp32, bf16 native; no fp16"))
    return [*cards, *_batch(config, driver.cards), *results]


def _query_driver(programs: Programs) -> Driver:
    loaded = read_text(hardware.SYS / "module/habanalabs/version")
    if shutil.which("hl-smi") is None:
        return Driver([], [], loaded, "hl-smi is not on PATH")
    fields = "name,driver_version,bus_id"
    answer = programs.run(["hl-smi", "-Q", fields, "-f", "csv,noheader"], DRIVER_S)
    if answer.problem:
        return Driver([], [], loaded, f"hl-smi: {answer.problem}")
    lines = [line.split(",") for line in answer.out.splitlines() if line.count(",") == 2]
    rows = [[field.strip() for field in line] for line in lines]
    if not rows:
        return Driver([], [], loaded, "hl-smi lists no card")
    return Driver([row[0] for row in rows], [row[2] for row in rows], rows[0][1], "")


def _releases(detail: str, driver: Driver, bridge: str) -> Check:
    """Check that driver and bridge are of the same release."""
    has, needs = (re.match(r"\d+\.\d+", version) for version in (driver.version, bridge))
    if has and needs and has[0] != needs[0]:
        remedy = f"use the vendor's image of release {has[0]}, or update the driver to {needs[0]}"
        return bad("hpu", f"{detail}: the releases do not match", remedy)
    if driver.problem:
        remedy = "hl-smi comes with the vendor's driver; in a container, mount it or use its image"
        return bad("hpu", f"{detail}; {driver.problem}", remedy)
    return ok("hpu", detail)


def _ports(programs: Programs, driver: Driver) -> list[Check]:
    """Check the links between the cards, which all-reduces of several cards use."""
    commands = [["hl-smi", "-n", "link", "-i", address] for address in driver.addresses]
    futures = [run_in_daemon_thread(partial(programs.run, argv, DRIVER_S)) for argv in commands]
    down, num_ports = [], 0
    for address, future in zip(driver.addresses, futures, strict=True):
        states = re.findall(r"port\s+(\d+)\s*:\s*(UP|DOWN)", future.result().out, re.IGNORECASE)
        num_ports += len(states)
        ports = [port for port, state in states if state.upper() == "DOWN"]
        down += [f"{address} port {', '.join(ports)}"] if ports else []
    if not num_ports:
        return []
    if not down:
        return [ok("hpu ports", f"{num_ports} up")]
    remedy = "needed for several cards: see dmesg, reload the driver; external ports may be unused"
    return [bad("hpu ports", f"down: {'; '.join(down)}", remedy)]


def _numa_map() -> list[Check]:
    """Return the cores that are next to each card."""
    cards: dict[int, list[int]] = {}
    for module, node in hardware.numa_nodes_of_cards("hpu").items():
        cards.setdefault(node, []).append(module)
    texts = []
    for node, modules in cards.items():
        cpus = read_text(hardware.SYS / f"devices/system/node/node{node}/cpulist")
        texts.append(f"card {','.join(map(str, modules))}: NUMA node {node} (CPU {cpus})")
    return [ok("hpu cores", "; ".join(texts))] if texts else []


def _batch(config: Config, cards: list[str]) -> list[Check]:
    """Suggest a faster batch size for Gaudi2."""
    size = config.train.batch_size
    if not any(map(GAUDI2.match, cards)) or size == "auto" or size % GAUDI2_BATCH == 0:
        return []
    below = size - size % GAUDI2_BATCH
    hint = " or ".join(f"--bs {n}" for n in (below, below + GAUDI2_BATCH) if n)
    return [ok("hpu batch", f"{size} a device; Gaudi2 is faster at multiples of 24", hint)]


def _huge_pages(num_cards: int) -> Check:
    table = read_table(hardware.PROC / "meminfo")
    pages = int(table.get("HugePages_Total") or 0)
    detail = f"{pages:,} of {table.get('Hugepagesize', '?')}"
    if not num_cards:
        return Check("huge pages", ABSENT, f"{detail}; not needed without Gaudi cards")
    advised = HUGE_PAGES_PER_CARD * num_cards
    if pages >= advised:
        return ok("huge pages", detail)
    remedy = (
        "sudo cp /etc/sysctl.conf /etc/sysctl.conf.bak; set vm.nr_hugepages = "
        f"{advised} in /etc/sysctl.conf; sudo sysctl -p; after training: sudo mv "
        "/etc/sysctl.conf.bak /etc/sysctl.conf; sudo sysctl -p. Too few end in 'Error mapping "
        f"memory'. Kubernetes pods request hugepages-2Mi={2 * advised}Mi instead"
    )
    return bad("huge pages", f"{detail}; {advised:,} are recommended (Voyager's number)", remedy)


def check_tpus(config: Config, programs: Programs, pci: Hardware) -> list[Check]:
    """Check the chips, that torch_xla matches torch, and which devices it detects."""
    is_wanted = config.train.device == "xla"
    chips = ", ".join(f"{n} x {TPUS[model]}" for model, n in Counter(pci.tpus).items())
    found = f"{chips} on the PCI bus; " if chips else ""
    if TPU_V2_OR_V3 in pci.tpus:
        found = found.replace(";", " (two cores a chip);")
    install = "pip install 'torch_xla[tpu]==2.9.*' 'torch==2.9.*'"
    if importlib.util.find_spec("torch_xla") is None:
        detail = f"{found}no torch_xla"
        if chips:
            return [bad("tpu", detail, f"{install}. {SUCCESSOR}", is_wanted=is_wanted)]
        return [absent("tpu", detail, f"{install}. {SUCCESSOR}", is_wanted=is_wanted)]
    full = {name: package_version(name) or "unknown" for name in ("torch", "torch_xla")}
    versions = {name: ".".join(version.split(".")[:2]) for name, version in full.items()}
    packages = f"torch_xla {versions['torch_xla']} with torch {versions['torch']}"
    if len(set(versions.values())) > 1:
        remedy = f"pip install 'torch=={versions['torch_xla']}.*'"
        return [bad("tpu", f"{found}{packages}: no match", remedy, is_wanted=is_wanted)]
    code = (
        "import torch_xla.runtime as r; "
        "print(r.global_runtime_device_count(), 'x', r.device_type())"
    )
    answer = programs.run_python(code)
    if answer.problem:
        remedy = "PJRT_DEVICE names the hardware (TPU); one process at a time can hold it"
        return [bad("tpu", f"{found}{packages}: {answer.problem}", remedy, is_wanted=is_wanted)]
    devices = (answer.out.strip().splitlines() or ["?"])[-1]
    return [ok("tpu", f"{devices}, {found}{packages}; fp32, bf16 native. {SUCCESSOR}")]
