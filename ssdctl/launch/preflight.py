"""Check a job's settings before it is queued, so that its ranks do not fail at the start."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence

from ssdctl.config import Config
from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.config.resolve import Resolved
from ssdctl.data.index import is_prepared
from ssdctl.data.open_dataset import count_images
from ssdctl.data.store_folder import DEFAULT_ROOTS, dataset_folders
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import DataError, UsageError
from ssdctl.launch import pod_spec
from ssdctl.launch.request import LaunchRequest
from ssdctl.training.run import check_without_data, finalize

FILE = re.compile(r"/|\.(pth?|safetensors|whl)$")


def check_train(request: LaunchRequest, resolved: Resolved) -> tuple[str, ...]:
    """Check that the ranks will accept the settings of `train`.

    The number of images is used if the dataset is prepared and on this machine.

    Args:
        request: The launch.
        resolved: The settings that the ranks will have.

    Returns:
        Notices: the settings that the ranks will replace.

    Raises:
        UsageError: The ranks would fail at the start.
    """
    device, config = DEVICE_TYPES[request.device], resolved.config.train
    notices = check_without_data(resolved, device)
    if config.execution not in (None, *device.executions):
        raise UsageError(
            f"device {device.name} does not support {config.execution} execution",
            hint=f"--execution {' or '.join(device.executions)}",
        )
    # pods have other folders; on TPU v2 and v3 one rank has several chips
    is_here = request.launcher != "kubernetes" and request.device != "xla"
    if is_here and config.batch_size != "auto" and (images := _count_images(resolved.config)):
        finalize(resolved, device, Ranks(0, request.count, 0), images)
    return notices


def _count_images(config: Config) -> int | None:
    """Return the training images of a prepared dataset on this machine; None if there is none."""
    root, folder = dataset_folders(config.data)
    try:
        if not root.exists() or not is_prepared(root, folder):
            return None
        images = count_images(root, folder).trainable
    except DataError:  # the ranks report it
        return None
    return images


def check_volumes(request: LaunchRequest, config: Config) -> None:
    """Check that the files that training reads and writes are on volumes of the pods.

    Raises:
        UsageError: A path is not on any volume, or a file to write is on a read-only one.
    """
    if request.command[0] != "train":
        return
    mounts, _ = pod_spec.volumes(request.kubernetes)
    places = [str(mount["mountPath"]) for mount in mounts]
    writable = [str(mount["mountPath"]) for mount in mounts if not mount.get("readOnly")]
    _require_volume("--mllog", config.train.mllog, writable)
    if request.kubernetes.install == "image":
        return  # an image that has ssdctl may have the data too
    if not config.train.fake_data:
        _require_volume("--data", config.data.root or str(DEFAULT_ROOTS[-1]), places)
        _require_volume("--store", config.data.store, places)
    if config.train.resume not in ("auto", "never"):
        _require_volume("--resume", config.train.resume, places)
    files = {
        "--init": config.train.init,
        "--backbone-weights": config.model.weights,
        "kubernetes.install": request.kubernetes.install,
    }
    for option, path in files.items():  # or a name, or a requirement of pip
        if path is not None and "://" not in path and FILE.search(path):
            _require_volume(option, path, places)


def _require_volume(option: str, path: str | None, places: Sequence[str]) -> None:
    if path is None:
        return
    clean = posixpath.normpath(path)
    if any(clean == place or clean.startswith(f"{place}/") for place in places):
        return
    is_file = option not in ("--data", "--store")
    mount = (posixpath.dirname(clean) if is_file else clean) if clean.startswith("/") else ""
    equals = "=" if option.startswith("kubernetes.") else " "
    hints = [f"mount it by kubernetes.volumes=SOURCE:{mount}"] if mount.strip("/") else []
    if places:
        hints.append(f"give its path in the pods: {option}{equals}{places[0]}/...")
    kind = "writable volume" if option == "--mllog" else "volume"
    raise UsageError(
        f"{option}{equals}{path}: the pods have no {kind} there",
        hint=", or ".join(hints) or "mount a volume: kubernetes.volumes=SOURCE:/work",
    )
