"""The table of device types: the names of a device in options, launchers and schedulers.

A new device type gets a row here, a module of its name in `ssdctl/device/` that opens it, and its
checks in `ssdctl/doctor/`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

DeviceName = Literal["auto", "cpu", "cuda", "hpu", "xla"]
LocalLauncher = Literal["torchrun", "mpirun"]


class DeviceType(NamedTuple):
    """One type of device.

    Attributes:
        name: The value of `--device`, and PyTorch's name of the device.
        plural: The option of `ssdctl launch` that counts its devices, without dashes.
        description: What is counted, in help texts.
        launcher: The program that starts one rank per device by default.
        slurm_gres: Slurm's usual name of the resource; None: none is requested.
        kubernetes_resource: The name of the resource in a pod; None: none is requested.
        precisions: The precisions in which it can train.
        executions: How its steps can run (`train --execution`), the default first.
        auto_precision: The fastest precision; `auto` if it is known when the device is opened.
    """

    name: str
    plural: str
    description: str
    launcher: LocalLauncher
    slurm_gres: str | None
    kubernetes_resource: str | None
    precisions: tuple[str, ...]
    executions: tuple[str, ...]
    auto_precision: str = "auto"

    @property
    def count_option(self) -> str:
        return f"--{self.plural}"


BF16, ALL = ("bf16", "fp32"), ("bf16", "fp16", "fp32")  # fp16 on a CPU takes 100 times as long
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
            precisions=BF16,
            executions=("lazy", "compile", "eager"),
            auto_precision="bf16",
        ),
        DeviceType(
            name="cuda",
            plural="gpus",
            description="GPUs",
            launcher="torchrun",
            slurm_gres="gpu",
            kubernetes_resource="nvidia.com/gpu",
            precisions=ALL,
            executions=("compile", "eager"),
        ),
        DeviceType(
            name="xla",
            plural="tpus",
            description="TPU chips",
            launcher="torchrun",
            slurm_gres=None,
            kubernetes_resource="google.com/tpu",
            precisions=BF16,
            executions=("lazy",),
            auto_precision="bf16",
        ),
        DeviceType(
            name="cpu",
            plural="cpus",
            description="processes on CPUs",
            launcher="torchrun",
            slurm_gres=None,
            kubernetes_resource=None,
            precisions=BF16,
            executions=("eager", "compile"),
        ),
    )
}
