"""The config of a call of the Python API: its keywords and `config`, and nothing else.

Also what to write instead of a keyword that a function does not have.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar

from ssdctl.config.render import values
from ssdctl.config.resolve import (
    Kind,
    Override,
    Resolved,
    of_call,
    resolve,
    setting_path,
    sources_of,
)
from ssdctl.config.settings import Config, all_settings
from ssdctl.errors import UsageError, hints_in_messages

if TYPE_CHECKING:
    from ssdctl.config.fields import DeviceName, Precision

PathLike = str | os.PathLike[str]
ConfigLike = Config | PathLike  # a config, or a config file
# Keywords that are not the names of their settings.
KEYWORDS = {
    "data": "data.root",
    "store": "data.store",
    "backbone": "model.backbone",
    "backbone_weights": "model.weights",
}
P = ParamSpec("P")
R = TypeVar("R")


def public(section: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function refuse keywords that it does not have, and raise errors with their hints.

    `section` is the table of its settings.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        keywords = inspect.signature(function).parameters

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with hints_in_messages():
                refuse_others(function.__name__, section, kwargs, keywords)
                return function(*args, **kwargs)

        return call

    return decorate


def refuse_others(
    caller: str, section: str, given: Iterable[str], keywords: Collection[str]
) -> None:
    """Raise UsageError for a keyword that does not exist; the hint says what to write instead."""
    for name in given:
        if name not in keywords:
            hint = _instead_of(name, section, keywords)
            raise UsageError(f"{caller}() has no keyword {name!r}", hint=hint)


def _instead_of(name: str, section: str, keywords: Collection[str]) -> str:
    tables = (section, "data", *(["model"] if section == "train" else []))
    for path in filter(None, (setting_path(f"{table}.{name}") for table in tables)):
        table, _, key = path.partition(".")
        keyword = next((k for k, p in KEYWORDS.items() if p == path), key)
        if keyword in keywords:
            return f"write {keyword}="
        if "config" in keywords:
            return f'write config=ssdctl.configure({table}={{"{key}": ...}})'
    if "config" in keywords and any(setting.section == name for setting in all_settings().values()):
        return f"write config=ssdctl.configure({name}=...)"
    near = difflib.get_close_matches(name, keywords, n=1)
    return f"did you mean {near[0]}?" if near else "help(ssdctl) lists the functions"


def overrides_of(section: str, arguments: Mapping[str, Any]) -> list[Override]:
    """Return the arguments of a call that are settings; None leaves a setting to the config."""
    paths = {name: KEYWORDS.get(name, f"{section}.{name}") for name in arguments}
    return [
        override_of(path, arguments[name], name)
        for name, path in paths.items()
        if path in all_settings() and arguments[name] is not None
    ]


def override_of(path: str, value: Any, label: str) -> Override:
    """Return a setting's value, which errors name by `label`."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # a number or an array of numpy, or a tensor
        value = value.tolist()
    return Override(path, list(value) if isinstance(value, tuple) else value, of_call(label))


class TrainSettings(TypedDict, total=False):
    """The keywords of `train`, for `Trainer`."""

    out: PathLike | None
    init: PathLike | None
    preset: str | None
    backbone: str | None
    backbone_weights: PathLike | None
    epochs: int | None
    steps: int | None
    batch_size: int | Literal["auto"] | None
    lr: float | None
    warmup: str | float | None
    optimizer: Literal["sgd", "adamw"] | None
    precision: Precision | None
    device: DeviceName | None
    workers: int | None
    seed: int | None


TRAIN_KEYWORDS = frozenset(TrainSettings.__annotations__)


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
