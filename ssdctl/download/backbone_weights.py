"""Backbone weights by name, verified, in the cache that torch.hub uses. Torch is not imported."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ssdctl.config import ModelConfig
from ssdctl.download.fetch import DEFAULT_POLICY, fetch_one, is_whole, no_progress
from ssdctl.download.http import RetryPolicy
from ssdctl.download.sources import weights_named
from ssdctl.download.transfer import Progress
from ssdctl.runtime.redact import redact_url

log = logging.getLogger(__name__)


def cache_dir() -> Path:
    """Return the folder of torch.hub's checkpoints: `hub/checkpoints` of $TORCH_HOME, by default
    `~/.cache/torch` ($XDG_CACHE_HOME honoured)."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("TORCH_HOME") or f"{cache}/torch"
    return Path(home).expanduser() / "hub" / "checkpoints"


def weights_of(model: ModelConfig) -> str | None:
    """Return the name or file of the backbone weights of a config; None: random weights.

    `imagenet-v1` is the backbone's own: `resnet34-imagenet-v1`.
    """
    if model.weights == "none":
        return None
    is_short = model.weights.startswith("imagenet-")
    return f"{model.backbone}-{model.weights}" if is_short else model.weights


def find_weights(name: str, dest: Path | None = None) -> Path | None:
    """Return the intact file of the weights called `name` in `dest` (default: the cache), or None.

    Raises:
        UsageError: There are no weights of that name.
    """
    file = weights_named(name).file
    path = (dest or cache_dir()) / file.name
    return path if is_whole(path, file) else None


def fetch_weights(
    name: str,
    dest: Path | None = None,
    *,
    mirror: str | None = None,
    retry_policy: RetryPolicy = DEFAULT_POLICY,
    progress: Progress = no_progress,
) -> Path:
    """Make sure that the weights called `name` are in `dest` (default: the cache); return the path.

    Without network it works if the file exists already.

    Raises:
        UsageError: There are no weights of that name.
        NetworkError: They cannot be fetched; the hint names the file and its folder.
        IntegrityError: The server's file is another one.
        DiskError: No space or no permission.
    """
    file = weights_named(name).file
    folder = dest or cache_dir()
    if not (folder / file.name).is_file():
        log.info("fetching %s to %s", redact_url(file.urls(mirror)[0]), folder)
    return fetch_one(
        name, file, folder, mirror=mirror, retry_policy=retry_policy, progress=progress
    )
