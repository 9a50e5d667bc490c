"""Read the weights and classes of a `.safetensors` file, which is untrusted.

`ssdctl export --format safetensors` describes the network in the file's metadata, `ssdctl push` in
`config.json` in the same folder.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, get_args

import msgspec
from torch import Tensor

from ssdctl.checkpoint.format import MAX_COUNT, ArchitectureFields, Count
from ssdctl.checkpoint.validation import check_classes, is_state
from ssdctl.config.fields import BackboneName
from ssdctl.data.classes import ClassName
from ssdctl.errors import IntegrityError, UsageError, missing_package

SUFFIX = ".safetensors"
CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16 << 20


class NetworkDescription(msgspec.Struct):
    """The part of `config.json` that is read back; other keys are for other programs."""

    architecture: ArchitectureFields
    classes: list[ClassName]
    format: Literal[1] = 1
    step: Count = 0
    epoch: Annotated[float, msgspec.Meta(ge=0, le=MAX_COUNT)] = 0.0


class WeightsFile(NamedTuple):
    """The contents of a file."""

    state: dict[str, Tensor]
    config: NetworkDescription


def read_safetensors(path: Path) -> WeightsFile:
    """Read a file of `ssdctl export` or `ssdctl push`.

    Raises:
        UsageError: There is no such file, or safetensors is not installed.
        IntegrityError: It is damaged, or does not describe an SSD300.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise missing_package("safetensors", "safetensors") from None
    try:
        # The sizes in the header are checked against the file before a tensor is allocated.
        with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
            config = _config(path, file.metadata() or {})
            names = file.keys()
            state = {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, ValueError, RuntimeError, TypeError, KeyError) as error:
        reason = (str(error) or repr(error)).splitlines()[0]
        raise IntegrityError(
            f"{path}: not a safetensors file, or a damaged one: {reason}"
        ) from None
    if not is_state(state):
        raise IntegrityError(f"{path}: its weights are not dense tensors of real numbers")
    return WeightsFile(state, config)


def _config(path: Path, metadata: dict[str, str]) -> NetworkDescription:
    """Return the description of the network: the file's own, else that of `config.json`.

    Raises:
        IntegrityError: There is none, or it describes another kind of network.
    """
    source = path
    try:
        if "architecture" in metadata:
            known = {k: v for k, v in metadata.items() if k in NetworkDescription.__struct_fields__}
            known.pop("format", None)  # other tools write `pt`
            fields = {k: msgspec.json.decode(v) for k, v in known.items()}
            config = msgspec.convert(fields, NetworkDescription)
        else:
            source = path.with_name(CONFIG_FILE)
            if source.stat().st_size > MAX_CONFIG_BYTES:
                raise ValueError(f"larger than {MAX_CONFIG_BYTES} bytes")
            config = msgspec.json.decode(source.read_bytes(), type=NetworkDescription)
        _check(config)
    except (OSError, ValueError, KeyError, RecursionError, msgspec.MsgspecError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise IntegrityError(
            f"{source}: not the description of an SSD300: {reason}",
            hint="expected a file of `ssdctl export --format safetensors`, or the folder or "
            "hf:// repository of `ssdctl push`",
        ) from None
    return config


def _check(config: NetworkDescription) -> None:
    """Raise ValueError if parts of a description contradict each other."""
    architecture = config.architecture
    if architecture.backbone not in get_args(BackboneName):
        raise ValueError(f"architecture: the backbone is {architecture.backbone[:40]!r}")
    if config.classes:  # a third-party checkpoint may have no names
        check_classes(config.classes, architecture.num_classes)
