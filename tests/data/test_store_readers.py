"""The examples in docs/data.md read the store with other programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Result
from pages import blocks

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def run_example(program: str) -> dict[str, Any]:
    """Run the page's example for a program in the working directory; return its variables."""
    pytest.importorskip(program)
    (block,) = [b for b in blocks(PAGE) if b.mark == f"store: {program}"]
    variables: dict[str, Any] = {}
    exec(compile(block.text, str(PAGE), "exec"), variables)
    return variables


@pytest.fixture
def document(shapes: Path, cli: Callable[..., Result]) -> dict[str, Any]:
    """The training annotations of a dataset that is prepared in ./prepared."""
    result = cli("prepare", "--data", shapes, "--store", "prepared")
    assert result.code == 0, result.err
    content = json.loads((shapes / "annotations/instances_train2017.json").read_text())
    assert isinstance(content, dict)
    return content


def test_pyarrow(document: dict[str, Any]) -> None:
    names = {c["id"]: c["name"] for c in document["categories"]}
    expected = dict.fromkeys(names.values(), 0)
    for entry in document["annotations"]:
        expected[names[entry["category_id"]]] += 1
    variables = run_example("pyarrow")
    assert variables["counts"] == expected
    documented = [
        line.split("`")[1] for line in PAGE.read_text().splitlines() if "| list of" in line
    ]
    assert set(documented) <= set(variables["table"].column_names)


def test_polars(document: dict[str, Any]) -> None:
    ids = [a["image_id"] for a in document["annotations"]]
    most = run_example("polars")["most"]
    assert most["boxes"][0] == max(map(ids.count, ids))
    assert most["boxes"].sum() == len(ids)


def test_duckdb(document: dict[str, Any]) -> None:
    with_boxes = {a["image_id"] for a in document["annotations"]}
    assert run_example("duckdb")["empty"] == len(document["images"]) - len(with_boxes)
