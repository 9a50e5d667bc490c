"""Define the metadata of settings and the value types with bounds."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from ssdctl.runtime.packages import plugin_names

Precision = Literal["auto", "bf16", "fp16", "fp32"]
# A package with a module for each name, and a group of entry points.
BACKBONES = ("ssdctl.model.backbones", "ssdctl.backbones")
AUGMENTATIONS = ("ssdctl.input.augmentations", "ssdctl.augmentations")
AUGMENTATION_LISTS = {
    "ssd": ("crop", "flip", "color"),
    "ssd-zoom": ("zoom", "crop", "flip", "color"),
    "none": (),
}
if TYPE_CHECKING:
    BackboneName = str
else:
    BackboneName = Literal[tuple(plugin_names(*BACKBONES))]

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
        **bounds: Of a number, as in `msgspec.Meta`: ge, gt, le, lt.
    """
    keys = ("flag", "panel", "metavar", "choice_flags", "aliases", "choices")
    values = (flag, panel, metavar, choice_flags, aliases, choices)
    return msgspec.Meta(description=help, extra=dict(zip(keys, values, strict=True)), **bounds)


LARGEST_INT = 2**63 - 1  # the limit of TOML and of checkpoints
NonNegativeInt = Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INT)]
Count = Annotated[int, msgspec.Meta(ge=1, le=LARGEST_INT)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]
# "3" or "3ep": epochs; "300st": optimizer steps; "10min": wall time (for saving).
Duration = Annotated[str, msgspec.Meta(pattern=r"^\d{1,9}(\.\d+)?(ep|st)?$")]
# The same, but above 0: the distance between two repeated events.
Interval = Annotated[str, msgspec.Meta(pattern=r"^(?![0.]+(ep|st|min)?$)\d{1,9}(\.\d+)?(ep|st)?$")]
IntervalOrTime = Annotated[
    str, msgspec.Meta(pattern=r"^(?![0.]+(ep|st|min)?$)\d{1,9}(\.\d+)?(ep|st|min)?$")
]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True): ...


def augmentation_names(augment: str) -> tuple[str, ...]:
    """Return the augmentations that `--augment` names, one by one or by a list."""
    parts = augment.split(",")
    return tuple(name for part in parts for name in AUGMENTATION_LISTS.get(part, (part,)))
