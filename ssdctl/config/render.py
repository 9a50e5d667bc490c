"""Write a config down: TOML with the source of each value, plain data for JSON, the JSON schema."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ssdctl.config.resolve import Resolved
from ssdctl.config.schema import Config
from ssdctl.config.settings import all_settings


def values(config: Config) -> dict[str, Any]:
    """Every setting's value by its path, as JSON types."""
    sections: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    return {f"{section}.{k}": v for section, table in sections.items() for k, v in table.items()}


def to_toml(resolved: Resolved, *, describe: bool = False) -> str:
    """The config as a file that `--config` reads back. Unset values are comments.

    Args:
        describe: Write each setting's help above it (`config init`) instead of its source.
    """
    lines: list[str] = []
    section = ""
    for path, value in values(resolved.config).items():
        setting = all_settings()[path]
        if setting.section != section:
            section = setting.section
            lines += ["", f"[{section}]"]
        comment = "" if describe else f"  # {resolved.sources[path]}"
        if describe:
            lines += [f"# {setting.help}"]
        if describe and setting.is_recipe:
            lines.append(f"# {setting.name} = {toml_value(value)}")
        elif value is None:
            lines.append(f"# {setting.name} ={comment or '  # not set'}")
        else:
            lines.append(f"{setting.name} = {toml_value(value)}{comment}")
    return "\n".join(lines).lstrip("\n") + "\n"


def toml_value(value: Any) -> str:
    """One value in TOML. JSON's strings, numbers and lists are TOML's too, but for DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def json_schema() -> dict[str, Any]:
    """The JSON schema of a config file, for editors: every key optional, unknown ones refused."""
    schema = msgspec.json.schema(Config)
    for definition in schema["$defs"].values():
        definition.pop("required", None)
        definition.pop("title", None)
        for field in definition["properties"].values():
            for extra in ("flag", "panel", "metavar", "choice_flags", "replaces", "maths"):
                field.pop(extra, None)
    return schema
