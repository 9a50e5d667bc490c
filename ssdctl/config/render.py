"""Format a config: TOML with the source of each value, plain data for JSON, the JSON schema."""

from __future__ import annotations

import functools
import json
import re
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from ssdctl.config.settings import (
    DEFAULT,
    RULES,
    Config,
    Kind,
    Setting,
    Source,
    all_settings,
    plain_type,
)
from ssdctl.runtime.safe_text import redact_urls

# A line of the file of a run: the value of a preset or a rule, not edited since.
RECORDED = re.compile(
    rf"\w+ = (?P<value>.*)  # (?P<source>preset [\w-]+|{'|'.join(map(str, RULES))}): (?P=value)"
)
SWITCHES = ["true", "True", "TRUE", "1", "false", "False", "FALSE", "0"]
NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"
# The tables that explain a run's result. The others may contain secrets: kubernetes.env, mirrors.
SNAPSHOT_SECTIONS = ("data", "model", "train", "evaluate")


def values(config: Config) -> dict[str, Any]:
    sections: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    return {path: sections[s.section][s.name] for path, s in all_settings().items()}


def snapshot(config: Config) -> dict[str, Any]:
    """Return the settings that explain a result, for files that are shared, without secrets."""
    return {
        path: redact_urls(value) if isinstance(value, str) else value
        for path, value in values(config).items()
        if path.partition(".")[0] in SNAPSHOT_SECTIONS
    }


def snapshot_sources(config: Config) -> dict[str, str]:
    """Return the sources of the values in `snapshot` that are not a preset's or a default."""
    return {
        path: str(source)
        for path, source in config.sources.items()
        if source.kind > Kind.PRESET and path.partition(".")[0] in SNAPSHOT_SECTIONS
    }


def to_snapshot_toml(config: Config) -> str:
    """Return `snapshot` as a file that `--config` reads back, with sources; see `RECORDED`."""
    return _tables(config, _with_source, snapshot(config))


@functools.cache
def default_lines() -> dict[str, str]:
    """Return the line of each default in the file of `to_snapshot_toml`."""
    settings = {path: s for path, s in all_settings().items() if not s.is_recipe}
    return {path: _with_source(s, s.default, DEFAULT)[0] for path, s in settings.items()}


def to_template_toml(config: Config) -> str:
    """Return a template config file: each setting's help and value as comments.

    Only values from options and of --config are active. The file changes nothing else until it is
    edited, and what stays a comment follows the presets and the defaults of later versions.
    """
    return _tables(config, _with_help, values(config))


def _tables(
    config: Config,
    lines_of: Callable[[Setting, Any, Source], list[str]],
    chosen: dict[str, Any],
) -> str:
    lines: list[str] = []
    section = ""
    for path, value in chosen.items():
        setting = all_settings()[path]
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"]
        lines += lines_of(setting, value, config.sources[path])
    return "\n".join(lines).lstrip("\n") + "\n"


def _with_source(setting: Setting, value: Any, source: Source) -> list[str]:
    if value is None and source.kind <= Kind.PRESET:
        return [f"# {setting.name} =  # {source}"]
    text = toml_value(value)
    # An edited line differs from the value behind it.
    recorded = f": {text}" if source.kind in (Kind.PRESET, Kind.RULE) else ""
    return [f"{setting.name} = {text}  # {source}{recorded}"]


def _with_help(setting: Setting, value: Any, source: Source) -> list[str]:
    mark = "" if source.kind in (Kind.CALL, Kind.FILE) else "#"
    is_complete = all(choice in setting.help for choice in setting.choices)
    choices = "" if is_complete else f": {', '.join(setting.choices)}"
    text = "" if value is None and mark else toml_value(value)
    return ["", f"# {setting.help}{choices}", f"{mark}{setting.name} = {text}".rstrip()]


def toml_value(value: Any) -> str:
    """Format one value as TOML. JSON strings, numbers and lists are TOML too, except for DEL.

    TOML has no null: empty text is read as None, also where a preset has a value.
    """
    return json.dumps("" if value is None else value, ensure_ascii=False).replace("\x7f", "\\u007f")


def plain_value(value: Any) -> str:
    """Format one value for people: no quotes, switches as on and off, empty if it is not set."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, (tuple, list)):
        return ",".join(map(plain_value, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def json_schema() -> dict[str, Any]:
    schema = msgspec.json.schema(Config)
    definitions = schema["$defs"]
    del definitions["Config"]["properties"]["sources"], definitions["Kind"], definitions["Source"]
    for definition in definitions.values():
        definition.pop("required", None)
        definition.pop("title", None)
    for setting in all_settings().values():
        section = definitions["Config"]["properties"][setting.section]["$ref"]
        definition = definitions[section.rpartition("/")[2]]
        field = definition["properties"][setting.name]
        if setting.is_table:
            field["type"] = ["array", "object"]
        if setting.kind is not None:
            field["enum"] = list(setting.choices)
        if others := _other_forms(setting):
            own = {key: field.pop(key) for key in [*field] if key not in ("description", "default")}
            field["anyOf"] = [own, *others]
        names = "|".join([setting.name, *setting.key_aliases]).replace("_", "[-_]")
        definition.setdefault("patternProperties", {})[f"^(?!{setting.name}$)({names})$"] = field
    return schema


def _other_forms(setting: Setting) -> list[dict[str, Any]]:
    """Return the schemas of values that are converted: `"0.1"` to a number, `"a,b"` to a list."""
    if setting.is_list:
        numbers = {"type": "array", "items": {"type": ["number", "string"]}}
        return [{"type": "string"}, *([] if setting.is_joined else [numbers])]
    target = plain_type(setting.type)
    kinds = {plain_type(kind) for kind in (target, *typing.get_args(target))}
    forms: list[dict[str, Any]] = [{"const": ""}] if setting.default is None else []
    if bool in kinds:
        forms.append({"enum": SWITCHES})
    elif float in kinds:
        forms.append({"type": "string", "pattern": NUMBER})
    elif int in kinds:
        forms.append({"type": "string", "pattern": r"^-?[0-9]+(\.0+)?(e[0-9]+)?$"})
    elif target is str and setting.kind is None:
        forms.append({"type": "number"})
    return forms
