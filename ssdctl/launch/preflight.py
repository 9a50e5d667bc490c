"""Check a job's settings before it is queued, so that its ranks do not fail at the start."""

from __future__ import annotations

import posixpath
import re

from ssdctl.config import Config
from ssdctl.config.devices import DEVICE_TYPES, DeviceType
from ssdctl.config.resolve import Resolved
from ssdctl.data.open_dataset import count_images
from ssdctl.data.store import is_prepared
from ssdctl.data.store_folder import dataset_folders
from ssdctl.errors import DataError, UsageError
from ssdctl.launch import pod_spec
from ssdctl.launch.request import LaunchRequest
from ssdctl.train.schedule import check_warmup
from ssdctl.train.small_data import adapted_plan, may_shorten_warmup


def check_train(request: LaunchRequest, resolved: Resolved) -> tuple[str, ...]:
    """Check that the ranks will accept the settings of `train`.

    Args:
        request: The launch.
        resolved: The settings that the ranks will have.

    Returns:
        Notices: the settings that the ranks will replace.

    Raises:
        UsageError: The ranks would fail at the start.
    """
    _check_schedule(request, resolved)
    device, config = DEVICE_TYPES[request.device], resolved.config.train
    if config.execution not in (None, *device.executions):
        raise UsageError(
            f"device {device.name} does not support {config.execution} execution",
            hint=f"--execution {' or '.join(device.executions)}",
        )
    return _check_precision(device, config.precision, resolved.sources["train.precision"])


def _check_schedule(request: LaunchRequest, resolved: Resolved) -> None:
    """Check that the warm-up is not longer than the run.

    The ranks compare optimizer steps, for which the number of images is needed: it is used if the
    dataset is prepared and on this machine.

    Raises:
        UsageError: The warm-up, chosen by the user, is too long.
    """
    if may_shorten_warmup(resolved):
        return
    if request.launcher != "kubernetes" and request.device != "xla":
        # pods have other folders; on TPU v2 and v3 one rank has several chips
        images = _count_images(resolved.config)
        if images and resolved.config.train.batch_size != "auto":
            adapted_plan(resolved, images, request.count)
            return
    check_warmup(resolved.config.train)


def _count_images(config: Config) -> int | None:
    """Return the training images of a prepared dataset on this machine; None if there is none."""
    root, folder = dataset_folders(config.data)
    try:
        if not root.exists() or not is_prepared(root, folder):
            return None
        images = count_images(root, folder).trainable
    except DataError:  # the ranks report it
        return None
    return min(images, config.train.limit_train or images)


def _check_precision(device: DeviceType, precision: str, source: str) -> tuple[str, ...]:
    if precision in ("auto", *device.precisions):
        return ()
    if source.startswith("preset "):
        return (
            f"{source} trains in {precision}, which device {device.name} does not "
            "support: its best precision is used instead",
        )
    flags = " or ".join(f"--{precision}" for precision in device.precisions)
    raise UsageError(
        f"device {device.name} does not compute in {precision}", hint=f"choose {flags}"
    )


def check_volumes(request: LaunchRequest, config: Config) -> None:
    """Check that the dataset and the weights are on volumes of the pods.

    Raises:
        UsageError: A path is not on any volume.
    """
    if request.command[0] != "train" or request.kubernetes.install == "image":
        return  # an image that has ssdctl may have the data too
    mounts, _ = pod_spec.volumes(request.kubernetes)
    places = [str(mount["mountPath"]) for mount in mounts]
    paths = {}
    if not config.train.fake_data:
        paths["--data"] = config.data.root or "(its default)"
    weights = config.model.weights
    if weights is not None and re.search(r"/|\.pth?$", weights):
        paths["--backbone-weights"] = weights
    for option, path in paths.items():
        clean = posixpath.normpath(path)
        if not any(clean == place or clean.startswith(f"{place}/") for place in places):
            example = places[0] if places else "/data"
            raise UsageError(
                f"{option} {path}: the pods have no volume there",
                hint=f"mount it by kubernetes.volumes=SOURCE:{example}, and give its path in the "
                f"pods: {option} {example}/...",
            )
