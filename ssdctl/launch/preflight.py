"""Check a job's settings before it is queued, so that its ranks do not fail at the start."""

from __future__ import annotations

import posixpath
import re

from ssdctl.config import Config
from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.errors import UsageError
from ssdctl.launch import pod_spec
from ssdctl.launch.request import LaunchRequest


def check_train(request: LaunchRequest, config: Config, precision_source: str) -> tuple[str, ...]:
    """Check that the ranks' devices support the settings of `train`.

    Args:
        request: The launch.
        config: The settings that the ranks will have.
        precision_source: Where `train.precision` came from, such as `preset nvidia-r50`.

    Returns:
        Notices: the settings that the ranks will replace.

    Raises:
        UsageError: The ranks would fail at the start.
    """
    device, precision = DEVICE_TYPES[request.device], config.train.precision
    if precision in ("auto", *device.precisions):
        return ()
    if precision_source.startswith("preset "):
        return (
            f"{precision_source} trains in {precision}, which device {device.name} does not "
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
