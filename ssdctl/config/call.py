"""The config of a call of the Python API: its keywords and `config`, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ssdctl.config.render import values
from ssdctl.config.resolve import (
    Kind,
    Override,
    Resolved,
    of_call,
    resolve,
    sources_of,
)
from ssdctl.config.settings import Config
from ssdctl.errors import UsageError

PathLike = str | os.PathLike[str]
ConfigLike = Config | PathLike  # a config, or a config file
# Keywords that are not the names of their settings.
KEYWORDS = {
    "data": "data.root",
    "store": "data.store",
    "backbone": "model.backbone",
    "backbone_weights": "model.weights",
}


def overrides_of(section: str, arguments: Mapping[str, Any]) -> list[Override]:
    """Return settings of a call by their keywords; None leaves a setting to the config."""
    return [
        override_of(KEYWORDS.get(name, f"{section}.{name}"), value, name)
        for name, value in arguments.items()
        if value is not None
    ]


def override_of(path: str, value: Any, label: str) -> Override:
    """Return a setting's value, which errors name by `label`."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # a number or an array of numpy, or a tensor
        value = value.tolist()
    return Override(path, list(value) if isinstance(value, tuple) else value, of_call(label))


def resolve_call(config: ConfigLike | None, given: Sequence[Override]) -> Resolved:
    """Resolve the config of a call from `config` and `given`; nothing else is read."""
    if isinstance(config, Mapping):
        raise UsageError("config: a dictionary", hint="write config=ssdctl.configure(train={...})")
    if not isinstance(config, Config):
        file = None if config is None else os.fspath(config)
        return resolve(file=file, overrides=given, environment={}, default_file=False)
    sources = sources_of(config)
    chosen = [
        Override(path, value, sources[path])
        for path, value in values(config).items()
        if sources[path].kind >= Kind.FILE  # the call may name another preset
    ]
    return resolve(overrides=[*chosen, *given], environment={}, default_file=False)
