"""The table of device types: the names of a device in options, launchers and schedulers.

A new device type gets a row here, a module in `ssdctl/device/` that opens it, a row in
`ssdctl/device/__init__.py`, and its checks in `ssdctl/doctor/`.
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
    """

    name: str
    plural: str
    description: str
    launcher: LocalLauncher
    slurm_gres: str | None
    kubernetes_resource: str | None
    precisions: tuple[str, ...]

    @property
    def count_option(self) -> str:
        """Return the option of `ssdctl launch` that counts its devices."""
        return f"--{self.plural}"


BF16, ALL = ("bf16", "fp32"), ("bf16", "fp16", "fp32")  # fp16 on a CPU takes 100 times as long
# For TPUs torchrun starts one process per chip, and torch_xla assigns a chip to each process.
DEVICE_TYPES = {
    device.name: device
    for device in (
        DeviceType("hpu", "hpus", "Gaudi cards", "mpirun", "hpu", "habana.ai/gaudi", BF16),
        DeviceType("cuda", "gpus", "GPUs", "torchrun", "gpu", "nvidia.com/gpu", ALL),
        DeviceType("xla", "tpus", "TPU chips", "torchrun", None, "google.com/tpu", BF16),
        DeviceType("cpu", "cpus", "processes on CPUs", "torchrun", None, None, BF16),
    )
}
