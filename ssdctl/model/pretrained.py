"""Backbone weights by name, verified, in the cache that torch.hub uses. Torch is not imported."""

from __future__ import annotations

import difflib
import logging
import re
from pathlib import Path
from typing import NamedTuple

from ssdctl.download.fetch import (
    DEFAULT_POLICY,
    fetch_one,
    is_whole,
    no_progress,
    sha256_of,
    torch_cache_dir,
)
from ssdctl.download.http import RetryPolicy
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.download.transfer import Progress
from ssdctl.errors import IntegrityError, UsageError
from ssdctl.model.backbones import BackboneFile, find_backbone
from ssdctl.runs.folder import tensorflow_checkpoint
from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import BACKBONES
from ssdctl.runtime.safe_text import redact_url

log = logging.getLogger(__name__)
FILE_NAME = re.compile(r"/|\.(pt|pth|bin|safetensors|npz|h5|ckpt.*|index|meta|data-\S+)$")
HASHED_NAME = re.compile(r"-(?!\d{8})([0-9a-f]{8})\.pth$")  # as PyTorch names its files; no date


class Weights(NamedTuple):
    """Pinned weights of a backbone."""

    backbone: str
    alias: str  # BACKBONE-KEY, such as resnet34-imagenet-v1
    file: PinnedFile

    @property
    def name(self) -> str:
        """The file's stem, such as `resnet34-333f7ec4`; some have no other alias."""
        return self.file.name.removesuffix(".pth")


def all_weights() -> tuple[list[Weights], list[UsageError]]:
    """Return the pinned weights of all backbones, and the errors of plugins that fail."""
    listed, errors = built_in_weights(), list[UsageError]()
    for name in dict.fromkeys(plugin.name for plugin in plugins.plugins(BACKBONES)):
        try:
            listed += _weights(name, find_backbone(name))
        except UsageError as error:
            errors.append(error)
    return listed, errors


def built_in_weights() -> list[Weights]:
    """Return the pinned weights of our own backbones; no plugin is imported."""
    ours = [name for name in plugins.names(BACKBONES) if name in plugins.built_in(BACKBONES)]
    modules = {name: plugins.built_in_module(BACKBONES, name) for name in ours}
    return [weights for name, module in modules.items() for weights in _weights(name, module)]


def _weights(backbone: str, file: BackboneFile) -> list[Weights]:
    return [Weights(backbone, f"{backbone}-{key}", pinned) for key, pinned in file.WEIGHTS.items()]


def weights_named(name: str) -> Weights:
    """Return the weights called `name`: a stem, a file name or an alias.

    Raises:
        UsageError: There are none; the hint names the nearest.
    """
    stem = name.removesuffix(".pth")
    listed = built_in_weights()
    others = {p.name for p in plugins.plugins(BACKBONES)} - {*plugins.built_in(BACKBONES)}
    for backbone in (other for other in others if stem.startswith(f"{other}-")):
        listed += _weights(backbone, find_backbone(backbone))
    by_name = {w.name: w for w in reversed(listed)} | {w.alias: w for w in listed}
    if stem in by_name:
        return by_name[stem]
    if (error := tensorflow_checkpoint(Path(name))) is not None:
        raise error
    if FILE_NAME.search(name):
        raise UsageError(
            f"{name}: no such file of backbone weights",
            hint="`ssdctl fetch-weights --list` shows weights by name",
        )
    own = next((f"{b}-" for b in plugins.names(BACKBONES) if stem.startswith(f"{b}-")), "")
    known = [n for n in by_name if n.startswith(own)]
    of_backbone = [weights.alias for weights in listed if weights.alias.startswith(f"{stem}-")]
    near = of_backbone or difflib.get_close_matches(stem, known, n=1, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise UsageError(
        f"no backbone weights are called {name!r}"
        if known
        else f"backbone {own[:-1]} has no published weights",
        hint=hint + "`ssdctl fetch-weights --list` shows all; --backbone-weights none needs none",
    )


def find_weights(name: str, dest: Path | None = None) -> Path | None:
    """Return the intact file of the weights `name` in `dest` (default: the cache), or None."""
    file = weights_named(name).file
    path = (dest or torch_cache_dir()) / file.name
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
    """
    file = weights_named(name).file
    folder = dest or torch_cache_dir()
    if not (folder / file.name).is_file():
        log.info("fetching %s to %s", redact_url(file.urls(mirror)[0]), folder)
    return fetch_one(
        name, file, folder, mirror=mirror, retry_policy=retry_policy, progress=progress
    )


def check_file(path: Path) -> None:
    """Check a file of backbone weights before it is loaded.

    Raises:
        UsageError: It is a checkpoint of TensorFlow.
        IntegrityError: The digits of a SHA-256 in its name are not the file's.
    """
    if (error := tensorflow_checkpoint(path)) is not None:
        raise error
    named = HASHED_NAME.search(path.name)
    if named is not None and not (digest := sha256_of(path, "")).startswith(named[1]):
        raise IntegrityError(
            f"{path}: its SHA-256 begins with {digest[: len(named[1])]}, not with {named[1]} "
            "as its name says",
            hint="copy or download it again; rename it if you changed it on purpose",
        )
