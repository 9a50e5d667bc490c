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


def missing_volumes(request: LaunchRequest, config: Config) -> list[UsageError]:
    """Return an error for each file of a training that is not on any volume of the pods."""
    if request.command[0] != "train":
        return []
    mounts, _ = pod_spec.volumes(request.kubernetes)
    places = [str(mount["mountPath"]) for mount in mounts]
    writable = [str(mount["mountPath"]) for mount in mounts if not mount.get("readOnly")]
    errors = [_check_volume("--mllog", config.train.mllog, writable)]
    if request.kubernetes.install != "image":  # an image that has ssdctl may have the data too
        files = {
            "--init": config.train.init,
            "--backbone-weights": config.model.weights,
            "kubernetes.install": request.kubernetes.install,
        }
        paths = {"--store": config.data.store}
        if not config.train.fake_data:
            paths["--data"] = config.data.root or str(DEFAULT_ROOTS[-1])
        if config.train.resume not in ("auto", "never"):
            paths["--resume"] = config.train.resume
        for option, path in files.items():  # or a name, or a requirement of pip
            if path is not None and "://" not in path and FILE.search(path):
                paths[option] = path
        errors += [_check_volume(option, path, places) for option, path in paths.items()]
    return [error for error in errors if error is not None]


def read_only_data(request: LaunchRequest, config: Config) -> str | None:
    """Return a warning if the dataset is on a read-only volume and no store is named."""
    if request.command[0] != "train" or config.data.store is not None or config.train.fake_data:
        return None
    mounts, _ = pod_spec.volumes(request.kubernetes)
    root = posixpath.normpath(config.data.root or str(DEFAULT_ROOTS[-1]))
    read_only = [str(mount["mountPath"]) for mount in mounts if mount.get("readOnly")]
    if not any(root == place or root.startswith(f"{place}/") for place in read_only):
        return None
    return (
        f"{root} is on a read-only volume, and every job would index it again: prepare it once on "
        "another volume (--store DIR)"
    )


def _check_volume(option: str, path: str | None, places: Sequence[str]) -> UsageError | None:
    if path is None:
        return None
    clean = posixpath.normpath(path)
    if any(clean == place or clean.startswith(f"{place}/") for place in places):
        return None
    is_file = option not in ("--data", "--store")
    mount = (posixpath.dirname(clean) if is_file else clean) if clean.startswith("/") else ""
    equals = "=" if option.startswith("kubernetes.") else " "
    hints = [f"mount it by kubernetes.volumes=SOURCE:{mount}"] if mount.strip("/") else []
    if places:
        hints.append(f"give its path in the pods: {option}{equals}{places[0]}/...")
    kind = "writable volume" if option == "--mllog" else "volume"
    return UsageError(
        f"{option}{equals}{path}: the pods have no {kind} there",
        hint=", or ".join(hints) or "mount a volume: kubernetes.volumes=SOURCE:/work",
    )
