"""Statements of a fixed form in the pages, compared with the code: tables, defaults, exit codes, names.

tests/test_docs.py has the commands, links and files of the pages.
"""

import ast
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.test_command_lines import read
from pages import PAGES, ROOT, every_page, prose, spans, words_of

import ssdctl
from ssdctl.cli.main import click_root
from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.config.sections import SaveFormat
from ssdctl.config.settings import all_settings
from ssdctl.data import index
from ssdctl.errors import ExitCode
from ssdctl.evaluation.analysis import ERROR_NAMES
from ssdctl.exporting import FORMATS, NMS, SUFFIXES
from ssdctl.files import parse_toml
from ssdctl.training.observers.trackers import BUILT_IN

DOCS = ROOT / "docs"
COLUMNS = index.TRUTH_COLUMNS | index.INDEX_COLUMNS | index.FINGERPRINT_COLUMNS
# Names of other programs' code.
FOREIGN = {"all_boxes", "load_state_dict", "torch_xla", "ssd300_vgg16"}


def table(page: str, first: str) -> list[list[str]]:
    """Return the rows of the table whose first column has this heading."""
    text = (DOCS / page).read_text(encoding="utf-8")
    head = re.search(rf"^\| {re.escape(first)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M)
    assert head is not None, (page, first)
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in head[1].splitlines()]


def named(cells: Iterable[str]) -> list[str]:
    """Return the inline code of cells."""
    return [span for cell in cells for span in spans(cell)]


def test_tables_list_what_there_is() -> None:
    """Each table names every device, format, error, tracker, preset, ... and no other."""
    extras = parse_toml((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name for name in extras["optional-dependencies"] if name not in ("all", "dali-cuda13")
    }
    packages = {path.name for path in (ROOT / "ssdctl").iterdir() if path.suffix == ".py"}
    packages |= {path.parent.name for path in (ROOT / "ssdctl").glob("*/__init__.py")}
    devices = {f"--device {name}" for name in (*DEVICE_TYPES, "NAME")}
    found = [
        (table("devices.md", "device"), 1, devices),
        (table("export.md", "`--format`"), 0, {*FORMATS}),
        (table("export.md", "option"), 0, {*(f"--nms {name}" for name in NMS), "--raw"}),
        (table("predict.md", "FORMAT"), 0, {*typing.get_args(SaveFormat)}),
        (table("install.md", "extra"), 0, extras),
        (table("trackers.md", "name"), 0, {*BUILT_IN, "--tensorboard"}),
        (table("recipes.md", "preset"), 0, {*all_settings()["train.preset"].choices}),
        (table("data.md", "column"), 0, {*COLUMNS}),
    ]
    for rows, column, expected in found:
        assert {*named(row[column] for row in rows)} == expected
    errors = {*map(str.lower, ERROR_NAMES.values())}
    assert {row[0] for row in table("evaluate.md", "type")} == errors
    names = named(row[0] for row in table("architecture.md", "package"))
    listed = {Path(name).name for name in names}
    assert listed == packages - {"__init__.py", "__main__.py", "_version.py"}


def test_devices() -> None:
    for _, device, executions, precisions in table("devices.md", "device"):
        if "plugin" in device:
            continue
        kind = DEVICE_TYPES[device.split()[-1].strip("`")]
        assert {*spans(executions)} - {"hpu_backend"} == {*kind.executions}
        assert spans(executions)[0] == kind.executions[0] or "is the default" in executions
        assert {*re.findall(r"\b[bf]\w*\d\d", precisions)} == {*kind.precisions}


def test_exported_files() -> None:
    for formats, file, *_ in table("export.md", "`--format`"):
        for name in spans(formats):
            assert SUFFIXES.get(name, ".pt") in file


def test_functions_and_their_commands() -> None:
    commands = click_root().commands
    for function, command, _ in table("python.md", "function"):
        assert callable(getattr(ssdctl, function.strip("`").split("(")[0].removeprefix("ssdctl.")))
        assert spans(command)[0].split()[1] in commands


def test_columns_of_the_store() -> None:
    for names, kind, _ in table("data.md", "column"):
        for name in spans(names):
            words = re.sub("list of (?:4 )?(.*)", r"list<\1>", kind)
            kind_in_file = str(COLUMNS[name]).replace("double", "float64")
            kind_in_file = re.sub(r"(?:fixed_size_|large_)?list<\w+: ", "list<", kind_in_file)
            kind_in_file = re.sub(r"(list<)+(\w+).*", r"list<\2>", kind_in_file)
            assert words == re.sub(r"\bfloat\b", "float32", kind_in_file), name


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.lower() or "true"  # of an option without a value


def defaults_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield the options that a page gives a default: `--x` (600), `--x N`, 128 by default, `--x` (the default)."""
    yield from re.findall(r"`(--[\w-]+) ?(\w*)` \(the default\)", text)
    yield from re.findall(r"`(--[\w-]+)[^`]*` \(([\d,.]+)\)", text)
    yield from re.findall(r"`(--[\w-]+) [A-Z]+`,\s+([\d,.]+)\s+by\s+default", text)


def test_defaults_are_those_of_the_options() -> None:
    options: dict[str, set[Any]] = {}
    for command in click_root().commands.values():
        for parameter in getattr(command, "params", []):
            for note in re.findall(r"\[default: ([\d.]+)\]", parameter.help or "") or [None]:
                options.setdefault(parameter.opts[-1], set()).add(note or parameter.default)
    for setting in all_settings().values():
        options.setdefault(setting.flags[0], set()).add(setting.default)
    found = [pair for page in PAGES for pair in defaults_in(prose(page))]
    assert len(found) > 1
    for flag, text in found:
        values = {_value(str(value)) for value in options[flag]}
        assert _value(text.replace(",", "")) in values, (flag, text, options[flag])


def test_exit_codes_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", text, re.M)
    assert rows == [(str(code), code.meaning) for code in ExitCode]


@every_page
def test_exit_codes_exist(page: Path) -> None:
    codes = {int(code) for code in ExitCode}
    pattern = r"\bexits?(?: codes?| with)*[ (]+(?:codes? )?(\d+)"
    for number in re.findall(pattern, prose(page)):
        assert int(number) in codes, (page.name, number)


@pytest.fixture(scope="module")
def code() -> set[str]:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "ssdctl").rglob("*.*")
             if path.suffix in (".py", ".toml", ".pyi")]  # fmt: skip
    return set(re.findall(r"\w+", "\n".join(texts)))


@pytest.mark.parametrize(
    "name", ["python", "evaluate", "input", "performance", "data", "predict", "export", "trackers"]
)
def test_keys_and_names_are_in_the_code(name: str, code: set[str]) -> None:
    """Keys of JSON, metrics, fields and functions: each `snake_case` word of a page."""
    words = {word for span in spans(prose(DOCS / f"{name}.md")) for word in span.split()}
    keys = {word for word in words if re.fullmatch(r"[a-z]+(_[a-z0-9]+)+", word)}
    assert keys - FOREIGN <= code, keys - FOREIGN - code


def strings(path: Path) -> Iterator[str]:
    """Yield the strings of a module; a value in them is `coco`, or nothing at the end of a word."""
    inside = set[int]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        parts = [node]
        if isinstance(node, ast.JoinedStr):
            parts = [*node.values]
            inside |= {id(part) for part in parts}
        elif not isinstance(node, ast.Constant) or id(node) in inside:
            continue
        texts = [str(p.value) if isinstance(p, ast.Constant) else "\0" for p in parts]
        yield re.sub("\0+", "coco", re.sub("(?<=\\w)\0+", "", "".join(texts)))


def test_commands_in_messages_and_examples_are_accepted() -> None:
    pattern = r"`(ssdctl [a-z][^`]*)`|(?:^|: )(ssdctl [a-z-]+ [^`;,()]*-[^`;,()]*)"
    modules = [path for path in (ROOT / "ssdctl").rglob("*.py") if "site" not in path.parts]
    pairs = {
        pair for path in modules for text in strings(path) for pair in re.findall(pattern, text)
    }
    lines = {first or second for first, second in pairs}
    assert len(lines) > 80
    for line in sorted(lines):
        if "[OPTIONS]" not in line and line.split()[1] not in ("help", "coco"):
            problem = read(*words_of(line.replace("...", "")))
            is_short = "missing argument" in problem or "missing option" in problem
            assert not problem or is_short or "Usage:" in problem, (line, problem)
