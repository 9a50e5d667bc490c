"""The config of a call of the Python API: its keywords and `config`, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ssdctl.config.render import values
from ssdctl.config.resolve import Override, of_call, resolve
from ssdctl.config.settings import Config, Kind
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


def resolve_call(config: ConfigLike | None, given: Sequence[Override]) -> Config:
    """Resolve the config of a call from `config` and `given`; nothing else is read."""
    if isinstance(config, Mapping):
        raise UsageError("config: a dictionary", hint="write config=ssdctl.configure(train={...})")
    if not isinstance(config, Config):
        file = None if config is None else os.fspath(config)
        return resolve(file=file, overrides=given, environment={}, default_file=False)
    return resolve(overrides=[*_chosen(config), *given], environment={}, default_file=False)


def _chosen(config: Config) -> list[Override]:
    """Return the user's values; the call may name another preset.

    `msgspec.structs.replace` changes values without their sources.
    """
    names = ("train.preset", config.train.preset), ("launch.cluster", config.launch.cluster)
    presets = [Override(path, value, of_call("config")) for path, value in names]
    plain = values(resolve(overrides=presets, environment={}, default_file=False))
    chosen = []
    for path, value in values(config).items():
        source = config.sources[path]
        if source.kind >= Kind.FILE:
            chosen.append(Override(path, value, source))
        elif source.kind is not Kind.RULE and value != plain[path]:
            chosen.append(Override(path, value, of_call("config")))
    return chosen
