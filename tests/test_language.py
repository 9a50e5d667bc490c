"""The names of the package: no class name with two meanings, no import circle."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ssdctl"


def test_no_public_class_name_has_two_meanings() -> None:
    places = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(path.relative_to(ROOT).as_posix())
    repeated = {name: files for name, files in places.items() if len(files) > 1}
    repeated.pop("Trainer")  # one meaning: ssdctl.Trainer opens that of training/ and steps it
    repeated.pop("Settings")  # of the interface: a launcher's own table of the config
    assert not repeated


def _imports(path: Path, modules: set[str]) -> set[str]:
    """The modules of the package that a module imports, anywhere in it, TYPE_CHECKING included."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                imported.add(name if name in modules else node.module)
    return imported & modules


def _circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The sets of modules that import each other: what is left when modules without imports, and
    modules that nothing imports, are removed again and again."""
    left = {name: set(targets) for name, targets in graph.items()}
    while True:
        used = set().union(*left.values()) if left else set()
        removed = {name for name, targets in left.items() if not targets or name not in used}
        if not removed:
            break
        left = {n: targets - removed for n, targets in left.items() if n not in removed}
    return [set(left)] if left else []


def test_no_import_circle() -> None:
    paths = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
        for p in PACKAGE.rglob("*.py")
    }
    graph = {name: _imports(path, set(paths)) - {name} for name, path in paths.items()}
    assert not _circles(graph)
    for name, path in paths.items():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"import_module\(\s*f?\"ssdctl", text), name


def test_the_circle_search_finds_one() -> None:
    assert _circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == [{"b", "c"}]
