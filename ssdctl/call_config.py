"""The config of a call of the Python API: its keywords and `config`, and nothing else.

Also what to write instead of a keyword that a function does not have.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ssdctl.config.render import values
from ssdctl.config.resolve import Override, Resolved, resolve, setting_path, sources_of
from ssdctl.config.schema import Config
from ssdctl.config.settings import all_settings
from ssdctl.config.sources import Kind, of_call
from ssdctl.errors import UsageError

if TYPE_CHECKING:
    from ssdctl.config.devices import DeviceName
    from ssdctl.config.fields import Precision

PathLike = str | os.PathLike[str]
ConfigLike = Config | PathLike  # a config, or a config file
# Keywords that are not the names of their settings.
KEYWORDS = {"data": "data.root", "store": "data.store", "backbone_weights": "model.weights"}


def replacement(section: str, *keywords: str, **renamed: str) -> Callable[[str], str | None]:
    """Return a function that says what replaces a wrong keyword.

    Args:
        section: The table whose settings were keywords.
        keywords: Those of the function that set something.
        renamed: Old keywords of the function, and the new ones.
    """

    def instead_of(name: str) -> str | None:
        if name in renamed:
            return f"write {renamed[name]}="
        tables = (section, "data", "model") if section == "train" else (section, "data", "evaluate")
        for table in dict.fromkeys(tables):
            if (path := setting_path(f"{table}.{name}")) is None:
                continue
            table, _, key = path.partition(".")
            names = {p: k for k, p in KEYWORDS.items()}
            if (keyword := names.get(path, key)) in keywords:
                return f"write {keyword}="
            return f'write config=ssdctl.configure({table}={{"{key}": ...}})'
        if any(setting.section == name for setting in all_settings().values()):
            return f"write config=ssdctl.configure({name}=...)"
        near = difflib.get_close_matches(name, keywords, n=1)
        return f"did you mean {near[0]}?" if near else "help(ssdctl) lists the functions"

    return instead_of


class TrainSettings(TypedDict, total=False):
    """The keywords of `train`, for `Trainer`."""

    out: PathLike | None
    init: PathLike | None
    preset: str | None
    backbone: str | None
    backbone_weights: PathLike | None
    epochs: float | None
    steps: int | None
    batch_size: int | Literal["auto"] | None
    lr: float | None
    warmup: str | float | None
    optimizer: Literal["sgd", "adamw"] | None
    precision: Precision | None
    device: DeviceName | None
    workers: int | None
    seed: int | None


TRAIN_PATHS = {
    name: KEYWORDS.get(name, "model.backbone" if name == "backbone" else f"train.{name}")
    for name in TrainSettings.__annotations__
}


def resolved_for_training(
    data: PathLike | None, config: ConfigLike | None, settings: Mapping[str, Any], caller: str
) -> Resolved:
    """Resolve the config of `train` or `Trainer`.

    Raises:
        UsageError: A keyword does not exist; the hint says what to write instead.
    """
    for name in settings.keys() - TRAIN_PATHS.keys():
        hint = replacement("train", *TRAIN_PATHS)(name)
        raise UsageError(f"{caller}: it has no keyword {name!r}", hint=hint)
    given = {TRAIN_PATHS[name]: value for name, value in settings.items()}
    return resolve_call(config, {"data.root": data, **given})


def resolve_call(
    config: ConfigLike | None, given: Mapping[str, Any], *, keep_none: bool = False
) -> Resolved:
    """Resolve the config of a call from its `config` and its keywords; nothing else is read.

    Args:
        config: A config, whose values keep their sources, or a config file.
        given: Values by the path of a setting.
        keep_none: Whether None is a value; else it leaves a setting unset.
    """
    overrides = []
    if isinstance(config, Config):
        sources = sources_of(config)
        overrides = [
            Override(path, value, sources[path])
            for path, value in values(config).items()
            if sources[path].kind >= Kind.FILE  # the call may name another preset
        ]
        config = None
    overrides += [
        _override(path, value) for path, value in given.items() if keep_none or value is not None
    ]
    file = None if config is None else os.fspath(config)
    return resolve(file=file, overrides=overrides, environment={}, default_file=False)


def _override(path: str, value: Any) -> Override:
    """Return a value with the option that it stands for as its source, as on the command line."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # a number or an array of numpy, or a tensor
        value = value.tolist()
    if isinstance(value, tuple):
        value = list(value)
    setting = all_settings().get(path)
    flag = f"--{path}" if setting is None else setting.flags[0]
    return Override(path, value, of_call(flag))
