"""The config: all settings of ssdctl, one by one, and the rules that involve several of them.

The command line's options, their help, the JSON schema, `config init` and the docs are generated
from the classes in sections.py, which define the type, bounds, default and meaning of each setting.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import re
import shlex
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from ssdctl.config.fields import MIN_TILE, augmentation_names
from ssdctl.config.sections import (
    DataConfig,
    DownloadConfig,
    EvaluateConfig,
    KubernetesConfig,
    LaunchConfig,
    ModelConfig,
    PredictConfig,
    PrepareConfig,
    SlurmConfig,
    TrainConfig,
)
from ssdctl.errors import UsageError
from ssdctl.files import parse_toml
from ssdctl.runtime import plugins
from ssdctl.runtime.plugins import (
    AUGMENTATION_LISTS,
    AUGMENTATIONS,
    BACKBONES,
    TRACKERS,
    PluginKind,
)


class Kind(enum.IntEnum):
    """The layers of a config; a later one overrides those before it."""

    DEFAULT = 0
    PRESET = 1  # a recipe or a cluster
    RULE = 2  # that adapts a run to its data or its device
    FILE = 3
    ENVIRONMENT = 4
    CALL = 5  # an option, or an argument of the Python API


class Source(NamedTuple):
    """The source of a value: which layer of the config set it."""

    kind: Kind
    label: str  # for people: `default`, `preset NAME`, `FILE:LINE`, `SSDCTL_X`, `--option`

    def __str__(self) -> str:
        return self.label

    def named(self, path: str) -> str:
        """Return the source for a message, with the setting's key if the label has no name."""
        if self == ASSIGNMENT:
            return f"--set {path}"
        return self.label if self.kind >= Kind.ENVIRONMENT else f"{self}: {path}"


DEFAULT = Source(Kind.DEFAULT, "default")
ASSIGNMENT = Source(Kind.CALL, "--set")
SMALL_DATA = Source(Kind.RULE, "small-data rule")
FINE_TUNING = Source(Kind.RULE, "fine-tuning rule")
INIT = Source(Kind.RULE, "checkpoint of --init")
SHORT_RUN = Source(Kind.RULE, "a tenth of the steps before the decay or the end")
RULES = (SMALL_DATA, FINE_TUNING, INIT, SHORT_RUN)


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings, and the source of each."""

    data: DataConfig
    download: DownloadConfig
    prepare: PrepareConfig
    model: ModelConfig
    train: TrainConfig
    evaluate: EvaluateConfig
    predict: PredictConfig
    launch: LaunchConfig
    kubernetes: KubernetesConfig
    slurm: SlurmConfig
    sources: Mapping[str, Source]  # by path, as in `train.lr`

    def is_chosen(self, *paths: str) -> bool:
        """Return whether the user set one of these settings: by a file, a variable or the call."""
        return any(self.sources[path].kind >= Kind.FILE for path in paths)

    def is_typed(self, *paths: str) -> bool:
        """Return whether the call itself sets one of these settings."""
        return any(self.sources[path].kind is Kind.CALL for path in paths)

    def require_not_given(self, paths: Iterable[str], reason: str, hint: str) -> None:
        """Refuse settings of the call that would have no effect on it.

        Those of files and variables are for other calls, too.

        Raises:
            UsageError: One of them is given; the message is its option and the reason.
        """
        for path in paths:
            if (source := self.sources[path]).kind is Kind.CALL:
                raise UsageError(f"{source.named(path)} {reason}", hint=hint)

    def explicit_settings(self) -> set[str]:
        """Return the settings that options or environment variables set, not those of files."""
        return {p for p, source in self.sources.items() if source.kind >= Kind.ENVIRONMENT}

    def with_value(self, path: str, value: Any, source: Source | None = None) -> Config:
        """Return a copy with one value replaced, and its source unless that is None."""
        section, _, name = path.partition(".")
        table = msgspec.structs.replace(getattr(self, section), **{name: value})
        sources = self.sources if source is None else {**self.sources, path: source}
        return msgspec.structs.replace(self, **{section: table, "sources": sources})

    def with_defaults(self, values: Mapping[str, Any]) -> Config:
        """Return a copy with other defaults, which only settings of the call override."""
        config = self
        for path, value in values.items():
            if self.sources[path].kind is not Kind.CALL:
                config = config.with_value(path, value, DEFAULT)
        return config


TABLES = {
    field.name: field.type for field in msgspec.structs.fields(Config) if field.name != "sources"
}


def conflicts(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, problem) of each rule between several settings that the config breaks."""
    model, train = config.model, config.train
    own = {"data.tile": config.data.tile, "train.decay_epochs": train.decay_epochs}
    for path, value in {**own, "train.augment": train.augment}.items():
        if problem := problem_of(path, value):
            yield (path,), problem
    if train.lr_decay == "cosine" and len(train.decay_epochs) != 2:
        keys = ("train.decay_epochs", "train.lr_decay")
        yield keys, "cosine needs two --decay-epochs, its start and its end"
    named = [name for name in plugins.names(BACKBONES) if model.weights.startswith(f"{name}-")]
    is_others = named and max(named, key=len) != model.backbone  # `resnet34-mine` is one, too
    if is_others and not Path(model.weights).is_file():
        keys = ("model.weights", "model.backbone")
        yield (
            keys,
            (
                f"{model.weights} does not fit {model.backbone}: choose both --backbone and "
                "--backbone-weights, such as imagenet-v1 or none"
            ),
        )
    with contextlib.suppress(UsageError):  # the commands that use the backbone report it
        norms = getattr(plugins.load(BACKBONES, model.backbone)[0], "EXTRA_NORMS", None)
        if norms in (("none",), ("batch",)) and model.extra_norm not in norms:
            keys = ("model.extra_norm", "model.backbone")
            problem = f"{model.backbone} has no extra blocks with {model.extra_norm}"
            yield keys, f"{problem}, only --extra-norm {norms[0]}"
    if "zoom" in augmentation_names(train.augment) and train.pipeline == "dali":
        yield ("train.augment", "train.pipeline"), "zoom needs --pipeline native"
    if train.init is not None and train.resume not in ("auto", "never"):
        keys = ("train.init", "train.resume")
        yield keys, "--init starts a new run, --resume FILE continues one"
    yield from _fold_conflicts(train)
    if train.fold is None and train.group is not None and config.is_typed("train.group"):
        yield ("train.group",), "belongs to --fold I/K"
    if train.profile is not None:
        first, last = map(int, train.profile.split(","))
        if last < first:
            yield ("train.profile",), f"step {last} is before step {first}"


def _fold_conflicts(train: TrainConfig) -> Iterator[tuple[tuple[str, ...], str]]:
    if train.fold is not None:
        number, count = map(int, train.fold.split("/"))
        if number > count or count < 2:
            yield ("train.fold",), "expected I/K with I from 1 to K, and K of 2 or more"
        if train.overfit is not None:
            yield ("train.fold",), "validates on other images than --overfit"


# The recipe: the settings without a default. Every preset sets them, and a resume compares them.
# The exceptions of the comparison:
NOT_COMPARED = {
    "model.weights",  # the first weights
    "train.epochs",  # a run may be made longer
    "train.batch_size",  # the global batch is compared
}
COMPARED_TOO = {
    *("train.seed", "train.ema", "train.freeze", "train.freeze_norm", "train.sync_bn"),
    *("train.tf32", "train.pipeline", "train.augment", "train.fake_data"),
    *("data.tile", "data.tile_overlap"),
    *("train.fold", "train.group", "train.limit_train", "train.overfit"),
    *("train.background", "train.background_negatives"),
}


class Setting(NamedTuple):
    """One setting. `path` is its key in files and `--set`, `flags` its options."""

    path: str
    type: Any
    default: Any  # msgspec.NODEFAULT if the presets set it
    help: str
    flags: tuple[str, ...]
    panel: str
    metavar: str | None
    own_choices: tuple[str, ...]
    kind: PluginKind | None
    choice_flags: bool
    aliases: tuple[str, ...]  # other spellings of the flags; `--fp16-flag=fp16` takes no value

    @property
    def section(self) -> str:
        return self.path.partition(".")[0]

    @property
    def name(self) -> str:
        return self.path.partition(".")[2]

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that are always possible; of a plugin, what is installed now."""
        return self.own_choices if self.kind is None else plugins.choices(self.kind)

    @property
    def parts(self) -> list[str]:
        """Names of plugins, if the value is a list of them."""
        names = plugins.choices(OF_NAMES[self.path]) if self.path in OF_NAMES else ()
        return [name for name in names if name not in self.choices]

    @property
    def words(self) -> set[str]:
        """Return the words that are always possible: choices, and those that the help names."""
        return {
            *self.choices,
            *(word for word in (self.metavar or "").split("|") if word.islower()),
        }

    @property
    def is_recipe(self) -> bool:
        """Return whether the presets set it instead of a default."""
        return self.default is msgspec.NODEFAULT

    @property
    def is_compared(self) -> bool:
        """Return whether a resume refuses another value: one that changes what a run computes."""
        return self.path in COMPARED_TOO or (self.is_recipe and self.path not in NOT_COMPARED)

    @property
    def is_flag(self) -> bool:
        return plain_type(self.type) is bool

    @property
    def is_list(self) -> bool:
        return typing.get_origin(plain_type(self.type)) is tuple

    @property
    def is_joined(self) -> bool:
        """Return whether several options add up: names do, of lists of numbers the last counts."""
        return self.is_list and plain_type(typing.get_args(plain_type(self.type))[0]) is str

    @property
    def is_table(self) -> bool:
        """Return whether a file may have a table for it instead of a list of `KEY=VALUE`."""
        return self.is_list and "=" in (self.metavar or "")

    @property
    def key_aliases(self) -> list[str]:
        """Return other names of its key in files, `--set` and variables: `bs` for `batch_size`."""
        flags = [] if self.is_flag or self.choice_flags else list(self.flags)
        spellings = [*flags, *(a for a in self.aliases if a.startswith("--") and "=" not in a)]
        names = [spelling.removeprefix("--").replace("-", "_") for spelling in spellings]
        return [name for name in dict.fromkeys(names) if name != self.name]

    def as_option(self, value: Any) -> str:
        """Return the option that sets a value, not None, on the command line."""
        if self.is_flag:
            return self.flags[0] if value else self.flags[1]
        if self.choice_flags:
            flag = f"--{value}"
            return flag if flag in self.flags else f"--set {self.path}={value}"
        if isinstance(value, (list, tuple)) and not value:
            return f"--set {self.path}=[]"
        text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        separator = "=" if text.startswith("-") else " "
        return f"{self.flags[0]}{separator}{shlex.quote(text)}"

    @property
    def environment(self) -> str:
        return f"SSDCTL_{self.section}__{self.name}".upper()


OF_NAMES = {"train.augment": AUGMENTATIONS, "train.tracker": TRACKERS}  # lists of plugins


def problem_of(path: str, value: Any) -> str | None:
    """Return what is wrong with a value of its setting's type, whatever the others are."""
    if path == "data.tile" and 0 < (value or 0) < MIN_TILE:
        return f"{value} pixels are too few: {MIN_TILE} or more, or 0 for no tiles"
    if path == "train.decay_epochs" and list(value) != sorted(set(value)):
        return "the epochs must increase"
    if path in ("train.group", "prepare.group") and value is not None:
        try:
            re.compile(value)
        except re.error as error:
            return f"{value}: not a regular expression: {error}"
    if path == "train.augment" and value not in AUGMENTATION_LISTS:
        known, names = plugins.choices(AUGMENTATIONS), augmentation_names(value)
        if unknown := [name for name in names if name not in known]:
            return f"no augmentation {unknown[0]!r}; there are {', '.join(known)}"
        if len(set(names)) < len(names):  # both would draw the same random numbers
            return f"a name occurs twice in {','.join(names)}"
        if {"crop", "zoom"} <= {*names} and names.index("crop") < names.index("zoom"):
            return "zoom after crop shows objects without their boxes: write zoom,crop"
    return None


@functools.cache
def other_programs() -> dict[str, dict[str, Any]]:
    return parse_toml(Path(__file__).with_name("other_programs.toml").read_text(encoding="utf-8"))


def plain_type(annotation: Any) -> Any:
    """Return the type without `Annotated` and `| None`."""
    if typing.get_origin(annotation) is typing.Annotated:
        return plain_type(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [a for a in typing.get_args(annotation) if a is not type(None)]
        if len(members) == 1:
            return plain_type(members[0])
    return annotation


def _setting(section: str, field: msgspec.structs.FieldInfo) -> Setting:
    meta = typing.get_args(field.type)[-1]  # nested Annotated types are flattened
    extra = meta.extra
    kind = plain_type(field.type)
    choices = typing.get_args(kind) if typing.get_origin(kind) is Literal else extra["choices"]
    dashed = field.name.replace("_", "-")
    if extra["choice_flags"]:
        flags = tuple(f"--{choice}" for choice in choices if choice != "auto")
    elif kind is bool:
        flags = (f"--{dashed}", f"--no-{dashed}")
    else:
        flags = (extra["flag"] or f"--{dashed}",)
    path = f"{section}.{field.name}"
    aliases = [f"--{dashed}", *extra["aliases"], *other_programs()["aliases"].get(path, ())]
    return Setting(
        path=path,
        type=field.type,
        default=field.default,
        help=meta.description,
        flags=flags,
        panel=extra["panel"] or ("Recipe" if field.default is msgspec.NODEFAULT else "Options"),
        metavar=extra["metavar"] or {int: "N", float: "X"}.get(kind),
        own_choices=choices,
        kind=extra["kind"],
        choice_flags=extra["choice_flags"],
        aliases=tuple(alias for alias in dict.fromkeys(aliases) if alias not in flags),
    )


@functools.cache
def all_settings() -> dict[str, Setting]:
    return {
        f"{section}.{field.name}": _setting(section, field)
        for section, table in TABLES.items()
        for field in msgspec.structs.fields(table)
    }


@functools.cache
def paths_by_key() -> dict[str, str]:
    """Return the path of each key that files, `--set` and variables may use, aliases included."""
    paths = {path: path for path in all_settings()}
    for path, setting in all_settings().items():
        for alias in setting.key_aliases:
            paths.setdefault(f"{setting.section}.{alias}", path)
    return paths


def select(*patterns: str) -> list[Setting]:
    """Return the settings that `section.name` or `section.*` (all of a section) select."""
    return [
        setting
        for pattern in patterns
        for path, setting in all_settings().items()
        if pattern in (path, f"{setting.section}.*")
    ]
