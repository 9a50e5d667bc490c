"""The config of a call of the Python API: its keywords and `config`, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypedDict, TypeVar, cast

from ssdctl.config.render import values
from ssdctl.config.resolve import Override, of_call, resolve
from ssdctl.config.settings import Config, Kind, Setting, all_settings
from ssdctl.errors import SsdctlError, UsageError
from ssdctl.files import own_refusal_of_disk
from ssdctl.runtime.packages import torch_as_imported

if TYPE_CHECKING:
    from ssdctl.config.fields import Precision

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
PathLike = str | os.PathLike[str]
ConfigLike = Config | PathLike  # a config, or a config file
LEAVE_OUT = "give a value, or leave it out"
# Keywords that are not the names of their settings.
KEYWORDS = {
    "data": "data.root",
    "store": "data.store",
    "backbone": "model.backbone",
    "backbone_weights": "model.weights",
}
# Messages name settings as options. Commands in them stay commands, for Python, too.
_COMMAND = r"\b(?:ssdctl|pip|datum) [a-z][^,;`)]*|--set "
_OPTION = re.compile(
    rf"(?P<kept>{_COMMAND})|(?<![\w-])--(?P<name>[a-z][a-z0-9-]*)\b(?![=-])"
    r"(?: (?P<word>[A-Z]+\b|[^\s,;)`]*[^\s,;)`.:?]))?"
)
_VALUE = re.compile(r"[A-Z]+|['\"].*|.*[\d./].*")  # besides the choices of an option


class TrainSettings(TypedDict, total=False):
    """The settings that `train` and `Trainer` take as keywords; `train` describes them."""

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
    device: str | None
    workers: int | None
    seed: int | None


class EvaluateSettings(TypedDict, total=False):
    """The settings that `evaluate` takes as keywords, which it describes."""

    split: Literal["train", "val", "test"] | None
    batch_size: int | None
    device: str | None
    precision: Precision | None
    workers: int | None
    limit: int | None
    score_threshold: float | None
    nms_iou: float | None


def takes_settings(settings: type) -> Callable[[F], F]:
    """Show the keys of a TypedDict in the signature of a function that has them as `**settings`.

    As in Python, other keywords raise TypeError.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        for name, hint in settings.__annotations__.items():
            text = getattr(hint, "__forward_arg__", hint)
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, keyword, default=None, annotation=text))
        known = {parameter.name for parameter in parameters}

        @functools.wraps(function)
        def checked(*arguments: Any, **keywords: Any) -> Any:
            for name in keywords.keys() - known:
                name_of = function.__qualname__
                raise TypeError(f"{name_of}() got an unexpected keyword argument {name!r}")
            return function(*arguments, **keywords)

        vars(checked)["__signature__"] = signature.replace(parameters=parameters)
        return cast("F", checked)

    return decorate


class hints_in_messages(contextlib.ContextDecorator):  # noqa: N801 - as contextlib's own
    """Around functions of the Python API: their expected errors print with their hints.

    An error of the file system becomes a DiskError, unless code of the user's met it.

    Args:
        choices: The values of keywords that are no settings.
    """

    def __init__(self, **choices: Sequence[str]) -> None:
        self._choices = choices

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, stack: object) -> None:
        refusal = own_refusal_of_disk(error)
        expected = error if refusal is None else refusal
        if isinstance(expected, SsdctlError):
            expected.tell_python(functools.partial(keywords_of, choices=self._choices))
        if refusal is not None:
            raise refusal from error


@contextlib.contextmanager
def public_call(**choices: Sequence[str]) -> Iterator[None]:
    """Around functions of the Python API that use torch; `choices`: see `hints_in_messages`."""
    with hints_in_messages(**choices), torch_as_imported():
        yield


def public_iterator(
    function: Callable[P, Generator[T, None, None]],
) -> Callable[P, Generator[T, None, None]]:
    """Decorate a generator function of the Python API: each step is a `public_call`."""

    @functools.wraps(function)
    def decorated(*args: P.args, **kwargs: P.kwargs) -> Generator[T, None, None]:
        generator = function(*args, **kwargs)
        try:
            while True:
                with public_call():
                    try:
                        item = next(generator)
                    except StopIteration:
                        return
                yield item
        finally:
            with public_call():
                generator.close()

    return decorated


def keywords_of(text: str, choices: Mapping[str, Sequence[str]]) -> str:
    """Return a message with the keywords of Python in place of options: `--bs 4` is `batch_size=4`.

    A keyword is a function's, or a key of the config. A word after an option is its value if it is
    one of its choices, a number, a path or a placeholder.
    """

    def keyword(match: re.Match[str]) -> str:
        if (kept := match["kept"]) is not None:
            return "" if kept == "--set " else kept
        option, word = match["name"], match["word"]
        name, setting = _settings_by_flag().get(f"--{option}", (option.replace("-", "_"), None))
        known = [*choices.get(name, ()), *(setting.words if setting else ())]
        value, rest = None, "" if word is None else f" {word}"
        if setting is not None and setting.choice_flags:
            value = option
        elif option.startswith("no-"):
            name, value = name.removeprefix("no_"), "False"
        elif word is not None and (word in known or _VALUE.fullmatch(word)):
            value, rest = word, ""
        if value is None:
            return f"`{name}`{rest}"
        is_plain = value == "False" or re.fullmatch(r"[A-Z]+|[\d.]+|['\"].*", value)
        return f"{name}={value}{rest}" if is_plain else f'{name}="{value}"{rest}'

    return _OPTION.sub(keyword, text)


@functools.cache
def _settings_by_flag() -> dict[str, tuple[str, Setting]]:
    """Return the keyword and the setting of each option."""
    names = {path: name for name, path in KEYWORDS.items()}
    found: dict[str, tuple[str, Setting]] = {}
    for path, setting in all_settings().items():
        for flag in setting.flags:
            found.setdefault(flag, (names.get(path, setting.name), setting))
    return found


def overrides_of(section: str, arguments: Mapping[str, Any]) -> list[Override]:
    """Return settings of a call by their keywords; None leaves a setting to the config."""
    return [
        override_of(KEYWORDS.get(name, f"{section}.{name}"), value, name)
        for name, value in arguments.items()
        if value is not None
    ]


def override_of(path: str, value: Any, label: str) -> Override:
    """Return a setting's value, which errors name by `label`."""
    if hasattr(value, "state_dict") and not isinstance(value, type):
        hint = f'write model.save("model.pt", class_names=[...]) and give {label}="model.pt"'
        raise UsageError(f"{label}: a network in memory, not a file", hint=hint)
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if hasattr(value, "tolist"):  # a number or an array of numpy, or a tensor
        value = value.tolist()
    if value == "":
        raise UsageError(f"{label} is empty", hint=LEAVE_OUT)
    return Override(path, list(value) if isinstance(value, tuple) else value, of_call(label))


def named_path(name: str, value: PathLike) -> Path:
    """Return an argument that is a path; an empty one would be the working folder."""
    if os.fspath(value) == "":
        raise UsageError(f"{name} is empty", hint=LEAVE_OUT)
    return Path(value)


def whole_number(name: str, value: Any, most: int | None = None) -> int:
    """Return an argument that must be an integer, 1 or more, of any type but bool."""
    with contextlib.suppress(TypeError):
        number = operator.index(value)
        if 1 <= number <= (number if most is None else most) and not isinstance(value, bool):
            return number
    limit = "1 or more" if most is None else f"from 1 to {most}"
    raise UsageError(f"{name} {value!r}: expected a whole number, {limit}")


def resolve_call(config: ConfigLike | None, given: Sequence[Override], *tables: str) -> Config:
    """Resolve the config of a call from `config` and `given`; nothing else is read.

    Args:
        tables: Of the settings whose rules are checked; none: all.
    """
    if isinstance(config, Mapping):
        raise UsageError("config: a dictionary", hint="write config=ssdctl.configure(train={...})")
    if isinstance(config, Config) and not given:
        return config
    if not isinstance(config, Config):
        file = None if config is None else os.fspath(config)
        overrides = [*given]
    else:
        file, overrides = None, [*_chosen(config), *given]
    used = {path for path, s in all_settings().items() if s.section in tables} if tables else None
    return resolve(file=file, overrides=overrides, environment={}, default_file=False, used=used)


def _chosen(config: Config) -> list[Override]:
    """Return the user's values; the call may name another preset.

    `msgspec.structs.replace` changes values without their sources.
    """
    paths = ["train.preset", "launch.cluster"]
    if config.sources["train.eval_every"].kind >= Kind.FILE:
        paths.append("train.eval_every")  # then a preset has no `eval_at`
    own = values(config)
    presets = [Override(path, own[path], of_call("config")) for path in paths]
    plain = values(resolve(overrides=presets, environment={}, default_file=False))
    chosen = []
    for path, value in own.items():
        source = config.sources[path]
        if source.kind >= Kind.FILE:
            chosen.append(Override(path, value, source))
        elif source.kind is not Kind.RULE and value != plain[path]:
            chosen.append(Override(path, value, of_call("config")))
    return chosen
