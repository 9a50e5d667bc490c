"""Save and load checkpoints, and load backbone weights. What is loaded is untrusted.

A checkpoint is one `.pt`: a zip whose CRCs are checked before anything is read, loaded with
`weights_only=True`, so a pickle that would run code is refused, never run. A `.safetensors`
file has only the weights and the classes (exported.py), other systems' have other keys
(third_party.py).
"""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ssdctl.checkpoint.format import (
    FORMAT,
    Architecture,
    Checkpoint,
    NetworkWeights,
    OnnxGraph,
    check_zip,
    compare_shapes,
    require_file,
)
from ssdctl.data.annotations import ClassName
from ssdctl.errors import IntegrityError, SsdctlError, UsageError
from ssdctl.files import atomic_write, unreadable
from ssdctl.runtime.packages import torch_warnings_ignored

Source: TypeAlias = Path | nn.Module  # a file, or an SSD300 in memory
ONNX, SAFETENSORS = ".onnx", ".safetensors"
OTHER_SUFFIXES = (ONNX, SAFETENSORS, ".pt2", ".xml", ".json")
HOW_TO_SAVE = "write checkpoints of your own with model.save(path, class_names=[...])"
OF_RUN = re.compile(r"(best|last|step-\d+)\.pt")  # names that others may not have
MAX_NAMED_KEYS = 5  # in the message for another program's file


def load_resumable(path: Path) -> Checkpoint:
    """Read a checkpoint of a run, with all that the run continues from.

    Raises:
        UsageError: There is no such file, or it has only weights.
        IntegrityError: It is damaged, not a checkpoint, or would run code.
    """
    read = load_checkpoint(path)
    if isinstance(read, Checkpoint):
        return read
    system = read.third_party
    kind = f"a checkpoint of {system}" if system else "a file of weights without their run"
    raise UsageError(
        f"{path} is {kind}: it cannot be resumed",
        hint=f"--init {path} starts a new run from its weights",
    )


def load_checkpoint(source: Source) -> NetworkWeights:
    """Read a checkpoint of ssdctl, MLPerf, Habana, NVIDIA, its TPU fork or torchvision.

    Raises:
        UsageError: There is no such file, or the module is not an SSD300.
        IntegrityError: It is damaged, not a checkpoint, or would run code.
    """
    if isinstance(source, nn.Module):
        return weights_in_memory(source)
    path = source
    if path.suffix == ONNX:
        raise UsageError(
            f"{path}: an ONNX file can be run and scored; this needs weights",
            hint="name the checkpoint that it was exported from",
        )
    if path.suffix in (".pt2", ".xml") and path.is_file():
        raise UsageError(
            f"{path}: ssdctl does not run files for torch.export or OpenVINO",
            hint="name the checkpoint that it was exported from, or an ONNX file",
        )
    if path.suffix == SAFETENSORS:
        from ssdctl.checkpoint.exported import read_safetensors

        return read_safetensors(path)
    payload = read_payload(path)
    try:
        return _read_any(path, payload)
    except SsdctlError:
        raise
    except Exception as error:  # a tensor in place of another value can raise anything
        raise IntegrityError(f"{path}: malformed checkpoint: {error!r:.300}") from error


def weights_in_memory(model: nn.Module) -> NetworkWeights:
    """Return a copy of a network's weights, in fp32, on the CPU.

    Args:
        model: An SSD300; in its place a wrapper, such as of DistributedDataParallel.

    Raises:
        UsageError: It is another module, or a subclass that computes something else.
    """
    network: Any = model
    while isinstance(inner := _wrapped(network), nn.Module):
        network = inner
    if not isinstance(getattr(network, "architecture", None), Architecture):
        raise UsageError(
            f"a {type(network).__name__} is not an SSD300",
            hint="give a network that ssdctl.SSD300 or ssdctl.load made, or a checkpoint",
        )
    for name in ("forward", "predict"):
        if not getattr(type(network), name).__module__.startswith("ssdctl."):
            raise UsageError(
                f"{type(network).__name__} has a `{name}` of its own, which a checkpoint lacks",
                hint="call `detect` of the network, or load its weights into an ssdctl.SSD300",
            )
    if any(t.is_meta or type(t).__name__ == "DTensor" for t in network.state_dict().values()):
        raise UsageError(
            "the network's weights are not in this process's memory (fully_shard, or device meta)",
            hint="gather them: torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
            "options=StateDictOptions(full_state_dict=True)), and load them into an ssdctl.SSD300",
        )
    state = {
        name: tensor.detach().to("cpu", _single(tensor.dtype), copy=True).contiguous()
        for name, tensor in network.state_dict().items()
    }
    return NetworkWeights(
        path=Path(f"SSD300 {network.architecture.backbone}"),
        model=state,
        architecture=network.architecture,
        classes=network.classes,
        thresholds=network.thresholds,
        tiling=network.tiling,
    )


def _wrapped(module: nn.Module) -> object:
    """Return the module in a wrapper of DistributedDataParallel, AveragedModel or torch.compile."""
    return getattr(module, "_orig_mod", None) or getattr(module, "module", None)


def _single(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def read_model(source: Source) -> NetworkWeights | OnnxGraph:
    """Read a detector to run it: a checkpoint, or an ONNX file of `ssdctl export`."""
    if isinstance(source, nn.Module) or source.suffix != ONNX:
        return load_checkpoint(source)
    from ssdctl.checkpoint.exported import read_onnx

    return read_onnx(source)


def save_checkpoint(path: Path, checkpoint: NetworkWeights) -> None:
    """Write a checkpoint atomically.

    Raises:
        DiskError: It cannot be written; an earlier file at `path` is unchanged.
    """
    with atomic_write(path) as file:
        try:
            torch.save(checkpoint.payload(), file)
        except RuntimeError as error:  # PyTorch's writer hides the OSError behind its own error
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from error


def _read_any(path: Path, payload: Any) -> NetworkWeights:
    number = payload.get("format") if isinstance(payload, dict) else None
    if number != FORMAT:
        from ssdctl.checkpoint import third_party

        if (system := third_party.source_of(payload)) is not None:
            return third_party.checkpoint_of(path, payload, system)
        raise _not_readable(path, payload, number)
    kind = Checkpoint if "optimizer" in payload else NetworkWeights
    return kind.read(path, payload)


def _not_readable(path: Path, payload: Any, number: object) -> SsdctlError:
    keys = list(payload) if isinstance(payload, dict) else []
    if isinstance(number, int) and number > FORMAT and "model" in keys:
        return UsageError(
            f"{path}: written by a newer version of ssdctl (format {number}); this one reads "
            f"{FORMAT}",
            hint="update ssdctl",
        )
    from ssdctl.checkpoint.third_party import has_own_weights, looks_like

    if has_own_weights(payload):
        return IntegrityError(
            f"{path}: weights of an SSD300 without its backbone and classes, as of "
            "torch.save(model.state_dict())",
            hint=HOW_TO_SAVE,
        )
    names = ", ".join(str(key)[:40] for key in keys[:MAX_NAMED_KEYS])
    has = f" (keys: {names})" if names else ""
    return IntegrityError(
        f"{path}: not a checkpoint that this version of ssdctl reads{has}{looks_like(payload)}",
        hint="expected a .pt file of ssdctl train, or of MLPerf, Habana or NVIDIA",
    )


def same_classes(weights: NetworkWeights, classes: list[ClassName]) -> bool:
    """Return whether a file has these classes in this order; their ids do not matter."""
    if not weights.classes:  # a third-party file without names: only the number can be compared
        if weights.has_ids_as_labels(classes):
            return [c.id for c in classes] == [*range(1, len(classes) + 1)]
        return weights.architecture.num_classes == len(classes) + 1
    return [c.name for c in weights.classes] == [c.name for c in classes]


def with_classes(
    checkpoint: NetworkWeights, model: nn.Module, classes: list[ClassName]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return a checkpoint's weights for a network with other classes.

    The class heads are those of `model` (new), except for the background and the classes with the
    name of one of the checkpoint's. Everything else is from the checkpoint.

    Returns:
        The weights, and the names of the classes that were kept.
    """
    state = with_counters(checkpoint.model, model)
    old = {"": 0, **{c.name: label for label, c in enumerate(checkpoint.classes, start=1)}}
    new = {"": 0, **{c.name: label for label, c in enumerate(classes, start=1)}}
    kept = [name for name in new if name in old]
    count = checkpoint.architecture.num_classes
    for name, tensor in model.state_dict().items():
        if not name.startswith("class_heads.") or name not in state:
            continue
        if state[name].shape[1:] != tensor.shape[1:]:  # another backbone's: load_state refuses it
            continue
        # Channels are class-major: (classes, box shapes).
        target = tensor.clone().unflatten(0, (len(classes) + 1, -1))
        expected = (count * target.shape[1], *tensor.shape[1:])
        compare_shapes({name: expected}, {name: tuple(state[name].shape)}, checkpoint.path)
        source = state[name].unflatten(0, (count, -1))
        for kept_name in kept:
            target[new[kept_name]] = source[old[kept_name]]
        state[name] = target.flatten(0, 1)
    return state, kept[1:]


def read_payload(path: Path) -> Any:
    """Return the content of a `.pt` file after a check of its CRCs, with tensors on the CPU.

    Files from before torch 1.6 are not zips and have no CRCs: only torch.load checks them.

    Raises:
        UsageError: There is no such file.
        IntegrityError: It is damaged or would run code.
    """
    from ssdctl.checkpoint.third_party import inert_globals

    require_file(path)
    try:
        with path.open("rb") as file:
            magic = file.read(2)
        if not magic:
            raise IntegrityError(
                f"{path}: an empty file", hint="copy it again, or use another checkpoint"
            )
        if magic == b"PK":
            check_zip(path)
        inert = torch.serialization.safe_globals(inert_globals())
        with torch_warnings_ignored(), inert:  # about formats that are checked by the result
            return torch.load(path, map_location="cpu", weights_only=True)
    except SsdctlError:
        raise
    except Exception as error:  # a hostile pickle can make the unpickler raise anything
        if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
            raise unreadable(path, error) from None
        raise _not_loaded(path, error) from None


def _not_loaded(path: Path, error: Exception) -> IntegrityError:
    """Return the error for one of torch.load, without its advice to load it unsafely."""
    from ssdctl.checkpoint.third_party import has_own_weights, looks_like

    named = re.search(r"GLOBAL (\S+)", str(error))
    reason = f"it names {named[1]}{looks_like(named[1])}" if named else _reason(error)
    hint = HOW_TO_SAVE if named and has_own_weights(named[1]) else None
    return IntegrityError(f"{path}: not a checkpoint (nothing was executed): {reason}", hint=hint)


def _reason(error: Exception) -> str:
    text = str(error)
    if "weights_only" in text or not isinstance(error, RuntimeError):
        return "torch.save did not write it, or it is damaged"
    return text.splitlines()[0]


def load_state(module: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Load weights, all or nothing, or raise IntegrityError with what differs."""
    check_shapes(module, state, path)
    module.load_state_dict(state)


def check_shapes(module: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Check that weights have the names and shapes of a module's, or raise IntegrityError."""
    compare_shapes(shapes_of(module.state_dict()), shapes_of(state), path)


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def with_counters(state: Mapping[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """Return a state dict with batch norm's step counters, which old PyTorch did not save."""
    counters = {
        name: torch.zeros_like(tensor)
        for name, tensor in module.state_dict().items()
        if name.endswith("num_batches_tracked")
    }
    return {**counters, **state}
