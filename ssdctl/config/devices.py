"""The table of device types: the names of a device in options, launchers and schedulers.

A new device type gets a row here, a module of its name in `ssdctl/device/` that opens it, and its
checks in `ssdctl/doctor/`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

DeviceName = Literal["auto", "cpu", "cuda", "hpu", "xla"]
LocalLauncher = Literal["torchrun", "mpirun"]


class DeviceType(NamedTuple):
    """One type of device."""

    name: str  # the value of `--device`, and PyTorch's name of the device
    plural: str  # the option of `ssdctl launch` that counts its devices, without dashes
    description: str  # what is counted, in help texts
    executions: tuple[str, ...]  # how its steps can run (`train --execution`), the default first
    launcher: LocalLauncher = "torchrun"  # starts one rank per device by default
    slurm_gres: str | None = None  # Slurm's usual name of the resource; None: none is requested
    kubernetes_resource: str | None = None  # its name in a pod; None: none is requested
    precisions: tuple[str, ...] = ("bf16", "fp32")  # fp16 on a CPU takes 100 times as long
    auto_precision: str = "auto"  # the fastest one; `auto` if it is known when a device is opened

    @property
    def count_option(self) -> str:
        return f"--{self.plural}"


# For TPUs torchrun starts one process per chip, and torch_xla assigns a chip to each process.
DEVICE_TYPES = {
    device.name: device
    for device in (
        DeviceType(
            name="hpu",
            plural="hpus",
            description="Gaudi cards",
            launcher="mpirun",
            slurm_gres="hpu",
            kubernetes_resource="habana.ai/gaudi",
            executions=("lazy", "compile", "eager"),
            auto_precision="bf16",
        ),
        DeviceType(
            name="cuda",
            plural="gpus",
            description="GPUs",
            slurm_gres="gpu",
            kubernetes_resource="nvidia.com/gpu",
            precisions=("bf16", "fp16", "fp32"),
            executions=("compile", "eager"),
        ),
        DeviceType(
            name="xla",
            plural="tpus",
            description="TPU chips",
            kubernetes_resource="google.com/tpu",
            executions=("lazy",),
            auto_precision="bf16",
        ),
        DeviceType(
            name="cpu",
            plural="cpus",
            description="processes on CPUs",
            executions=("eager", "compile"),
        ),
    )
}
