"""The metadata of settings, the types of their values, and the table of device types."""

from typing import Annotated, Any, Literal, NamedTuple, get_args

import msgspec

from ssdctl.errors import UsageError
from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import AUGMENTATION_LISTS, DEVICES, PluginKind

Precision = Literal["auto", "bf16", "fp16", "fp32"]
ClusterName = Literal["voyager"]
PresetName = Literal[
    "mlperf-r34", "nvidia-r50", "habana-tf-r34", "stable-r34", "dali-r34", "torchvision-vgg16"
]


def setting(
    help: str,
    *,
    flag: str | None = None,
    panel: str | None = None,
    metavar: str | None = None,
    choice_flags: bool = False,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    kind: PluginKind | None = None,
    **bounds: Any,
) -> msgspec.Meta:
    """Describe one field.

    Args:
        help: One sentence, units included.
        flag: The option's name if it differs from the field's.
        panel: The heading under which `--help` lists it; None: Recipe if the presets set it, else
            Options.
        metavar: The placeholder of the value in `--help`; None: N or X for numbers.
        choice_flags: Make one flag per choice (`--bf16`) instead of one option with a value.
        aliases: Standard spellings with the same meaning, hidden. Long ones are key aliases too.
            Those of other programs are in other_programs.toml.
        choices: Values of a text setting that accepts others too. A Literal has its own.
        kind: Of the plugins that the setting names: the value is a name, or a reserved word.
        **bounds: Of a number, as in `msgspec.Meta`: ge, gt, le, lt.
    """
    keys = ("flag", "panel", "metavar", "choice_flags", "aliases", "choices", "kind")
    values = (flag, panel, metavar, choice_flags, aliases, choices, kind)
    return msgspec.Meta(description=help, extra=dict(zip(keys, values, strict=True)), **bounds)


LARGEST_INT = 2**62  # half the limit of TOML, checkpoints and seeds: sums do not exceed it
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INT)]
Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_INT)]
BatchSize = Annotated[int, msgspec.Meta(ge=1, le=65_536)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
# "3" or "3ep": epochs; "300st": optimizer steps; "10min": wall time (for saving).
Duration = Annotated[str, msgspec.Meta(pattern=r"^\d{1,9}((\.\d+)?(ep)?|st)$")]
# The same, but above 0: the distance between two repeated events.
Interval = Annotated[str, msgspec.Meta(pattern=r"^(?![0.]+(ep|st)?$)\d{1,9}((\.\d+)?(ep)?|st)$")]
IntervalOrTime = Annotated[
    str, msgspec.Meta(pattern=r"^(?![0.]+(ep|st|min)?$)\d{1,9}((\.\d+)?(ep|min)?|st)$")
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True): ...


def augmentation_names(augment: str) -> tuple[str, ...]:
    """Return the augmentations that `--augment` names, one by one or by a list."""
    parts = augment.split(",")
    return tuple(name for part in parts for name in AUGMENTATION_LISTS.get(part, (part,)))


LocalLauncher = Literal["torchrun", "mpirun"]


MIN_TILE = 32  # pixels


class Tiling(NamedTuple):
    """How images are cut into tiles."""

    size: int  # pixels of the sides of a tile
    overlap: float  # least overlap of neighbors, as a fraction of a side


class DeviceType(NamedTuple):
    """One type of device: its names in options, launchers and schedulers.

    A plugin has its own as `TYPE`.
    """

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

    def choose_execution(self, requested: str | None) -> str:
        """Return the requested execution, or the default one; UsageError if it is not supported."""
        if requested is not None and requested not in self.executions:
            raise UsageError(
                f"device {self.name} does not support {requested} execution",
                hint=f"--execution {' or '.join(self.executions)}",
            )
        return requested or self.executions[0]


# TPUs: `tpu` by TorchTPU, or `xla` by torch_xla, which older chips need; `launch --tpus` chooses.
# torchrun starts one process per chip.
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
            name="tpu",
            plural="tpus",
            description="TPU chips",
            kubernetes_resource="google.com/tpu",
            executions=("compile", "eager"),
            auto_precision="bf16",
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
# One for each option of `launch` that counts devices.
COUNTED_DEVICES = tuple(
    {device.plural: device for device in reversed(DEVICE_TYPES.values())}.values()
)[::-1]


def device_type(name: str) -> DeviceType:
    """Return the type of a device; raise UsageError unless it is built in or of a right plugin."""
    if name in DEVICE_TYPES:
        plugins.find(DEVICES, name)
        return DEVICE_TYPES[name]
    module, plugin = plugins.load(DEVICES, name)
    assert plugin is not None
    kind: Any = getattr(module, "TYPE", None)
    plugin.require(
        isinstance(kind, DeviceType) and kind.name == name, f"TYPE, a DeviceType with name={name!r}"
    )
    with plugin.errors("checking its TYPE"):
        known = {e for other in DEVICE_TYPES.values() for e in other.executions}
        plugin.require(kind.executions and {*kind.executions} <= known, f"executions of {known}")
        plugin.require({*kind.precisions} <= {*get_args(Precision)} - {"auto"}, "known precisions")
        plugin.require(kind.launcher in get_args(LocalLauncher), "launcher torchrun or mpirun")
        plugin.require(callable(getattr(module, "open_device", None)), "a function open_device")
    found: DeviceType = kind
    return found
