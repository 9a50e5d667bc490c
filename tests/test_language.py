"""The text of the package: no class name with two meanings, no import circle, and commands in messages
and pages that work today. ssdctl is on no package index, so they name the packages that are missing."""

from __future__ import annotations

import ast
import graphlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    pass
else:
    pass

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ssdctl"


def test_no_public_class_name_has_two_meanings() -> None:
    files = defaultdict(list)
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append(path.relative_to(ROOT).as_posix())
    repeated = {name: paths for name, paths in files.items() if len(paths) > 1}
    assert not repeated


PATHS = {
    ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p
    for p in PACKAGE.rglob("*.py")
}


def _imports(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules of the package that import statements name."""
    imported: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in PATHS else node.module for name in names}
    return imported & set(PATHS)


def test_no_import_circle() -> None:
    """Of all imports, those in functions and TYPE_CHECKING included."""
    texts = {name: path.read_text(encoding="utf-8") for name, path in PATHS.items()}
    graph = {n: _imports(ast.walk(ast.parse(text))) - {n} for n, text in texts.items()}
    graphlib.TopologicalSorter(graph).prepare()  # an error names the circle
    hidden = r"import_module\(\s*f?\"ssdctl|__import__|modules\[\"ssdctl"
    found = {name for name, text in texts.items() if re.search(hidden, text)}
    # A method that is a public function of the package, in a layer above.
    assert found == {"ssdctl.runs.run"}


@pytest.mark.parametrize(("module", "most"), [("step", 20), ("trainer", 90)])
def test_a_reader_of_the_step_and_the_loop_needs_few_modules(module: str, most: int) -> None:
    """The modules that importing it leads to; packages count only where they are imported from."""
    start = f"ssdctl.training.{module}"
    found, waiting = set[str](), [start]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += _imports(ast.parse(PATHS[name].read_text(encoding="utf-8")).body)
    assert 10 < len(found - {start}) <= most


PAGES = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.html")]


def test_remedies_do_not_install_ssdctl_from_an_index() -> None:
    pattern = r"ssdctl\[\w|pip install (--?[\w-]+ )*'?ssdctl\b(?!-)"
    texts = [(path.name, path.read_text(encoding="utf-8")) for path in [*PATHS.values(), *PAGES]]
    matches = [(name, match[0]) for name, text in texts for match in re.finditer(pattern, text)]
    assert len(texts) > 100
    assert matches == []


def test_functions_are_short() -> None:
    """The functions of the Python API list their keywords, and explain each."""
    for name, path in PATHS.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and name != "ssdctl.api":
                lines = (node.end_lineno or 0) - node.lineno + 1
                assert lines <= 60, (name, node.name, lines)
