"""Read checkpoints and backbone weights, which are untrusted files.

A checkpoint is one `.pt`: a zip whose CRCs are checked before anything is read, loaded with
`weights_only=True`, so a pickle that would run code is refused, never run.
"""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssdctl.data.coco import ClassName
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.model.ssd300 import SSD300

FORMAT = 1
SHOWN = 6  # keys named in a message


class Architecture(NamedTuple):
    """What it takes to build the network of a checkpoint."""

    backbone: str
    extra_norm: str
    num_classes: int  # with background

    def build(self) -> SSD300:
        return SSD300(self.backbone, self.num_classes, self.extra_norm)


class Checkpoint(NamedTuple):
    """A checkpoint, read whole."""

    path: Path
    model: dict[str, Tensor]
    architecture: Architecture
    classes: list[ClassName]
    config: dict[str, Any]  # values by setting, as the run had them
    step: int
    samples_seen: int
    images: int  # that the run trained on
    best_ap: float | None
    optimizer: dict[str, Any]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint of ours.

    Raises:
        UsageError: There is no such file.
        IntegrityError: It is damaged, no checkpoint, or would run code.
    """
    payload = read_payload(path)
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        raise IntegrityError(
            f"{path}: no checkpoint that this version of ssdctl reads",
            hint="expected a .pt file that ssdctl train wrote",
        )
    try:
        return Checkpoint(
            path=path,
            model=payload["model"],
            architecture=Architecture(**payload["architecture"]),
            classes=[ClassName(**c) for c in payload["classes"]],
            config=payload["config"],
            step=payload["step"],
            samples_seen=payload["samples_seen"],
            images=payload["images"],
            best_ap=payload["best_ap"],
            optimizer=payload["optimizer"],
        )
    except (KeyError, TypeError) as error:
        raise IntegrityError(f"{path}: a checkpoint with parts missing: {error}") from None


def read_payload(path: Path) -> Any:
    """What a `.pt` file holds, once its CRCs are right. Tensors land on the CPU.

    Raises:
        UsageError: There is no such file.
        IntegrityError: It is damaged or would run code.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file")
    verify(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).strip().splitlines()[0]
        raise IntegrityError(
            f"{path}: refused: it holds more than tensors and plain values ({reason})",
            hint="it was not loaded, and no code of it ran",
        ) from None
    except (RuntimeError, ValueError, EOFError, OSError) as error:
        raise IntegrityError(f"{path}: cannot be loaded: {error}") from None


def verify(path: Path) -> None:
    """Check that a file is a whole zip with right CRCs, or raise IntegrityError."""
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError, OSError) as error:
        raise IntegrityError(
            f"{path}: no checkpoint, or a damaged one: {error}",
            hint="an earlier one may be whole: look in the run's checkpoints/",
        ) from None
    if broken is not None:
        raise IntegrityError(f"{path}: damaged: the CRC of {broken} is wrong")


def load_network(checkpoint: Checkpoint) -> SSD300:
    """The network of a checkpoint, with its weights.

    Raises:
        IntegrityError: The weights do not fit; the message lists what differs.
    """
    model = checkpoint.architecture.build()
    load_state(model, checkpoint.model, checkpoint.path)
    return model


def load_state(module: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load weights, all or nothing, or raise IntegrityError with what differs."""
    expected = module.state_dict()
    wrong = [f"missing {name}" for name in expected if name not in state]
    wrong += [f"unexpected {name}" for name in state if name not in expected]
    wrong += [
        f"{name} is {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
        for name, tensor in expected.items()
        if name in state and state[name].shape != tensor.shape
    ]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise IntegrityError(f"{path}: does not fit the network: {'; '.join(wrong[:SHOWN])}{more}")
    module.load_state_dict(state)


def load_backbone(model: SSD300, path: Path) -> None:
    """Put torchvision's ResNet weights into the backbone; what lies behind conv4_x is left out.

    Raises:
        IntegrityError: The file is damaged, or holds another network.
    """
    # torchvision's older files are no zips: nothing to check but what torch.load itself checks.
    if zipfile.is_zipfile(path):
        verify(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise IntegrityError(f"{path}: no backbone weights: {reason}") from None
    if not isinstance(state, Mapping) or not all(isinstance(v, Tensor) for v in state.values()):
        raise IntegrityError(f"{path}: no backbone weights: not a state dict")
    kept = {k: v for k, v in state.items() if not k.startswith(("layer4.", "fc."))}
    load_state(model.backbone, kept, path)
