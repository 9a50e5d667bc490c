"""Layer the sources of a config: defaults < preset < file < environment < command line.

    config = resolve(overrides=[Override("train.lr", "1e-3", of_call("--lr"))])
    config.train.lr, config.sources["train.lr"]

Every value is checked together with its source, so that a message can name the file and line, the
variable or the option. Values are text or TOML values; nothing is evaluated.
"""

from __future__ import annotations

import datetime
import difflib
import os
import re
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from ssdctl import files
from ssdctl.config.fields import LARGEST_INT
from ssdctl.config.render import RECORDED, default_lines
from ssdctl.config.settings import (
    ASSIGNMENT,
    DEFAULT,
    TABLES,
    Config,
    Kind,
    Setting,
    Source,
    all_settings,
    conflicts,
    paths_by_key,
    plain_type,
    problem_of,
)
from ssdctl.errors import UsageError
from ssdctl.files import DECODE_ERRORS, msgspec_type

DEFAULT_FILE = "ssdctl.toml"
PRESET_DIR = Path(__file__).parent / "presets"
CLUSTER_DIR = Path(__file__).parent / "clusters"
PREFIX = "SSDCTL_"
# The settings of the files that `ssdctl launch` read, as JSON: they rank as in a file, not as
# variables. The name does not begin with SSDCTL_, as settings do.
FILES_VARIABLE = "_SSDCTL_FILES"
MAX_FILE_BYTES = 16 << 20
LARGEST_FLOAT = 1e9  # sums and products stay finite
OFF = {"train.eval_every": "0", "train.profile": "0,0"}  # other programs' "never"
PLAIN_TYPES = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
}


def of_call(label: str) -> Source:
    return Source(Kind.CALL, label)


class Override(NamedTuple):
    """One value from one source: a file and line, a variable or an option."""

    path: str
    value: Any
    source: Source


def resolve(
    *,
    file: str | None = None,
    overrides: Iterable[Override] = (),
    environment: Mapping[str, str] | None = None,
    default_file: bool = True,
    used: Set[str] | None = None,
) -> Config:
    """Return a config: layers are file (None: ./ssdctl.toml), environment, `overrides`.

    Args:
        used: The settings whose rules are checked; None: all. A file may have those of other
            commands.
    """
    environment = os.environ if environment is None else environment
    launched = "{}" if file is not None else environment.get(FILES_VARIABLE, "{}")
    try:
        of_files = msgspec.json.decode(launched, type=dict[str, str])
    except DECODE_ERRORS:
        raise UsageError(f"{FILES_VARIABLE}: not what `ssdctl launch` sets") from None
    if file is None and default_file and os.path.lexists(DEFAULT_FILE):
        file = DEFAULT_FILE
    of_file = [] if file is None else read_toml(Path(file))
    layers = [
        *(o for o in of_file if o.source.kind > Kind.PRESET),
        *(Override(k, v, Source(Kind.FILE, FILES_VARIABLE)) for k, v in of_files.items()),
        *_from_environment(environment),
        *overrides,
    ]
    checked = [_checked(o) for o in layers]
    if any(o.path == "train.preset" and o.source.kind > Kind.FILE for o in checked):
        checked = [o for o in checked if o.source.kind is not Kind.RULE]  # fitted to another one
    chosen = {o.path: o.value for o in checked}  # the last one counts
    recipe = preset_overrides(chosen.get("train.preset", all_settings()["train.preset"].default))
    if "train.eval_every" in chosen:  # instead of the evaluation epochs of a preset
        recipe = [o for o in recipe if o.path != "train.eval_at"]
    cluster = chosen.get("launch.cluster")
    of_cluster = _overrides_in(CLUSTER_DIR, "cluster", cluster) if cluster else []

    defaults = [Override(s.path, s.default, DEFAULT) for s in all_settings().values()]
    sections: dict[str, dict[str, Any]] = {name: {} for name in TABLES}
    sources: dict[str, Source] = {}
    for path, value, source in [*defaults, *recipe, *of_cluster, *checked]:
        section, _, name = path.partition(".")
        sections[section][name] = value
        sources[path] = source
    tables = {
        name: msgspec.convert(sections[name], msgspec_type(table)) for name, table in TABLES.items()
    }
    config = Config(**tables, sources=sources)
    for paths, problem in conflicts(config):
        # Name the setting with the highest precedence first, then where others were set.
        first, *others = sorted(paths, key=lambda path: -sources[path].kind)
        if used is None or sources[first].kind is Kind.CALL or not used.isdisjoint(paths):
            given = [p for p in others if Kind.FILE <= sources[p].kind < Kind.CALL]
            named = f" ({', '.join(sources[p].named(p) for p in given)})" * bool(given)
            raise UsageError(f"{sources[first].named(first)}: {problem}{named}")
    return config


def preset_overrides(name: str) -> list[Override]:
    return _overrides_in(PRESET_DIR, "preset", name)


def _overrides_in(folder: Path, kind: str, name: str) -> list[Override]:
    source = Source(Kind.PRESET, f"{kind} {name}")
    return [_checked(o)._replace(source=source) for o in read_toml(folder / f"{name}.toml")]


def read_toml(path: Path) -> list[Override]:
    """Return the values of a config file, each with its line.

    Values that the config file of a run records, and the user did not choose, have the kind of
    their source: a default, a preset or a rule.
    """
    text, tables = files.read_toml(path, MAX_FILE_BYTES, "config file")
    lines, names, overrides = _lines_of_keys(text), dict[str, tuple[str, Any]](), []
    rows = text.splitlines()
    for key, value in _flatten(tables):
        source = Source(Kind.FILE, f"{path}:{lines[key]}" if key in lines else str(path))
        refuse_twice(key, key, value, names, f"{source}: ")
        row = rows[lines[key] - 1] if key in lines else ""
        if row == default_lines().get(key):
            source = DEFAULT
        elif recorded := RECORDED.fullmatch(row):
            is_preset = recorded["source"].startswith("preset ")
            source = Source(Kind.PRESET if is_preset else Kind.RULE, recorded["source"])
        overrides.append(Override(key, value, source))
    return overrides


def refuse_twice(
    path: str, name: str, value: Any, names: dict[str, tuple[str, Any]], where: str = ""
) -> None:
    """Add a source's name and value of a setting; raise UsageError if it has others for it."""
    first, other = names.setdefault(setting_path(path) or path, (name, value))
    if first != name and other != value:
        raise UsageError(f"{where}{name} is the same setting as {first}", hint="delete one")


def _flatten(tables: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, table in tables.items():
        if isinstance(table, dict):
            yield from ((f"{name}.{key}", value) for key, value in table.items())
        else:
            yield name, table


def _lines_of_keys(text: str) -> dict[str, int]:
    """Return the line of each `section.key`, which the TOML parser does not report."""
    numbers: dict[str, int] = {}
    table = ""
    # Text of several lines has no keys.
    text = re.sub(r"('{3}|\"{3}).*?\1", lambda m: "\n" * m[0].count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(text.replace('"', "").splitlines(), start=1):
        if header := re.match(r"\s*\[\s*([\w.-]+)\s*\]", line):
            table = header[1] + "."
            numbers.setdefault(header[1], number)
        elif key := re.match(r"\s*([\w.-]+)\s*=", line):
            numbers.setdefault(table + key[1], number)
    return numbers


def _from_environment(environment: Mapping[str, str]) -> list[Override]:
    overrides, names = [], dict[str, tuple[str, Any]]()
    for variable, text in environment.items():
        if variable.startswith(PREFIX):
            try:
                f"{variable}{text}".encode()
            except UnicodeEncodeError:  # Python's stand-ins for other bytes
                raise UsageError(f"{variable}: {text!r} is not UTF-8 text") from None
            path = variable.removeprefix(PREFIX).lower().replace("__", ".", 1)
            refuse_twice(path, variable, text, names)
            overrides.append(Override(path, text, Source(Kind.ENVIRONMENT, variable)))
    return overrides


def parse_assignments(
    texts: Iterable[str], typed: Mapping[str, str] | None = None
) -> list[Override]:
    """Return the overrides of every `--set KEY=VALUE`; lists of names are joined.

    Args:
        typed: The options that were typed instead of some of them, such as `--dtype`.
    """
    overrides: dict[str, Override] = {}
    for text in texts:
        override = parse_assignment(text)
        if label := (typed or {}).get(f"--set={text}"):
            override = override._replace(source=of_call(label))
        path = setting_path(override.path) or override.path
        if (first := overrides.get(path)) is not None and first.value != override.value:
            if path not in all_settings() or not all_settings()[path].is_joined:
                raise UsageError(
                    f"--set {path} is given twice: {first.value} and {override.value}",
                    hint="give it once",
                )
            override = first._replace(value=[*_as_list(first.value), *_as_list(override.value)])
        overrides[path] = override
    return list(overrides.values())


def parse_assignment(text: str) -> Override:
    path, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: expected KEY=VALUE, as in --set train.lr=0.001")
    return Override(path.strip(), value.strip(), ASSIGNMENT)


def _checked(override: Override) -> Override:
    """Return an override with the setting's path and a value of its type; raise UsageError."""
    setting, value = _lookup(override), override.value
    named = override.source.named(override.path)
    target = plain_type(setting.type)
    if OFF.get(setting.path) == str(value):
        value = None
    if isinstance(value, str):
        value = value.removesuffix("\n")  # of YAML's block text
        if value.startswith("~/"):  # only a shell expands it, and not after `--out=`
            value = os.path.expanduser(value)  # noqa: PTH111 - the rest stays as it is
        if setting.is_list:
            value = _as_list(value)
        elif value[:1] == value[-1:] == '"' and target is not bool:
            value = _toml(value)
        elif float in (target, *map(plain_type, get_args(target))):  # .5, 1. and +0.5, too
            if re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?", value, re.IGNORECASE):
                value = str(float(value))
            value = value.removeprefix("+")
    elif setting.is_table and isinstance(value, dict):
        value = _pairs(override, value)
    elif target is str and type(value) in (int, float, datetime.time):
        value = str(value)  # warmup = 3 in a file means "3"; time = 12:00:00 is one for TOML
    if value == "" and setting.default is None:
        value = None
    try:
        if isinstance(value, list) and any(str(part)[:2] in ('["', "['") for part in value):
            raise msgspec.ValidationError('expected `A,B`, or `["A", "B"]` as in a TOML file')
        is_strict = not isinstance(value, (str, float, list))
        value = msgspec.convert(value, setting.type, strict=is_strict)
        _check_magnitude(value)
        if setting.kind is not None and value not in setting.choices:
            raise msgspec.ValidationError("unknown name")
        if value == "":
            raise UsageError(f"{named} is empty", hint="give a value, or leave it out")
        if problem := problem_of(setting.path, value):
            raise UsageError(f"{named}: {problem}")
        return override._replace(path=setting.path, value=value)
    except msgspec.ValidationError as error:
        problem = _readable_problem(setting, str(error))
        hint = _fraction_hint(str(value), problem)
        if setting.path == "train.epochs":
            hint = "--steps N ends a run within an epoch"
        raise UsageError(f"{named}: {override.value!r}: {problem}", hint=hint) from None


def _fraction_hint(value: str, problem: str) -> str | None:
    """Return what a percentage is as a fraction, if it was given for one."""
    is_fraction = value.endswith("%") or re.search(r"number <=? 1(\.0)?$", problem)
    if not is_fraction or not re.fullmatch(r"\d+(\.\d+)?%?", value):
        return None
    percent = float(value.rstrip("%"))
    return f"{percent:g}% is {percent / 100:g}" if 1 < percent <= 100 else None


def _as_list(value: Any) -> Any:
    """Return the values of a list: `a,b`, or as in a file, `["a", "b"]`."""
    if not isinstance(value, str):
        return value
    listed = _toml(value) if value.startswith("[") else value
    if isinstance(listed, list):
        return listed
    return [part.strip() for part in value.split(",") if part.strip()]


def _pairs(override: Override, table: dict[str, Any]) -> list[str]:
    for key, value in table.items():
        if not isinstance(value, (str, int, float)):
            raise UsageError(
                f"{override.source}: {override.path}: the value of {key} is not text",
                hint='keys with dots need quotes: "app.kubernetes.io/name" = "ssd"',
            )
    return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in table.items()]


def _toml(value: str) -> Any:
    """Return a value as a config file has it; the text itself if it is not TOML."""
    try:
        return files.parse_toml(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        return value


def _check_magnitude(value: Any) -> None:
    """Raise ValidationError if a number is infinite, or so large that results would be."""
    for number in value if isinstance(value, tuple) else (value,):
        limit = LARGEST_INT if isinstance(number, int) else LARGEST_FLOAT
        if isinstance(number, (int, float)) and abs(number) > limit:
            raise msgspec.ValidationError(f"Expected `{type(number).__name__}` <= {int(limit):,}")


def _readable_problem(setting: Setting, problem: str) -> str:
    """Return what a value should be, from the message of msgspec."""
    if setting.choices and "," not in (setting.metavar or ""):  # a list as text
        return f"expected one of {', '.join(setting.choices)}"
    if "regex" in problem or "enum" in problem:  # enum: a number or a word
        return f"expected {setting.metavar} ({setting.help})"
    problem = problem[0].lower() + problem[1:].replace("`", "")
    problem = problem.replace(", got str", "")  # the message already quotes the value
    for name, plain in PLAIN_TYPES.items():
        problem = re.sub(rf"(expected |\| |got ){name}\b", rf"\1{plain}", problem)
    return problem.replace(" | null", "").replace(" | ", " or ")


def _lookup(override: Override) -> Setting:
    if (path := setting_path(override.path)) is not None:
        return all_settings()[path]
    if any(setting.section == override.path for setting in all_settings().values()):
        raise UsageError(
            f"{override.source}: {override.path!r} is a table of settings, not a setting",
            hint="`ssdctl config schema` lists its settings",
        )
    dotted = setting_path(override.path.replace("_", ".", 1))
    if override.source.kind is Kind.ENVIRONMENT and dotted is not None:  # SSDCTL_TRAIN_LR
        variable = all_settings()[dotted].environment
        raise UsageError(f"{override.source}: unknown variable", hint=f"did you mean {variable}?")
    raise UsageError(
        f"{override.source}: unknown key {override.path!r}", hint=nearest_key(override.path)
    )


def setting_path(key: str) -> str | None:
    """Return the path of the setting that a key names, aliases included: `train.bs`."""
    return paths_by_key().get(key.replace("-", "_"))


def nearest_key(path: str) -> str:
    """Return a hint that names the setting closest to a mistyped one, first of the same table.

    The exact name of a setting in another table is better than a similar name.
    """
    path = re.sub(rf"^({'|'.join(TABLES)})_", r"\1.", path)  # SSDCTL_TRAIN_BACKBONE
    section, _, name = path.rpartition(".")
    section = (difflib.get_close_matches(section, TABLES, n=1, cutoff=0.65) or [section])[0]
    own: dict[str, str] = {}  # the path of each name and option of the table
    others: dict[str, str] = {}
    for setting in all_settings().values():
        paths = own if setting.section == section else others
        for word in (setting.name, *setting.flags, *setting.aliases):
            paths.setdefault(_plain(word), setting.path)
        paths.setdefault(setting.section, setting.section)
    # A similar name in another table is another setting, unless there is no such table.
    for paths, cutoff in ((own, 1), (others, 1), (own, 0.65), (others, 0.85 if own else 0.65)):
        if near := difflib.get_close_matches(_plain(name), paths, n=1, cutoff=cutoff):
            return f"did you mean {paths[near[0]]!r}?"
    return "`ssdctl config schema` lists all keys"  # unlike `show`, it reads no settings


def _plain(word: str) -> str:
    return word.lstrip("-").replace("-", "_")
