"""The examples in docs/data.md read the store with other programs."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from conftest import Cli
from data.formats.exports import edited
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
def document(dataset: Path, cli: Cli) -> dict[str, Any]:
    """The training annotations of a dataset that is prepared in ./prepared."""
    path = dataset / "annotations/instances_train2017.json"
    with edited(path) as content:
        boxes = [a for a in content["annotations"] if a["image_id"] != 1]
        dropped = {**boxes[0], "id": 9999, "image_id": 1, "bbox": [1, 1, 0, 9]}
        content["annotations"] = [*boxes, dropped]
    cli("prepare", "--data", dataset, "--store", "prepared").expect(0)
    return {**content, "annotations": boxes}


def test_pyarrow(document: dict[str, Any]) -> None:
    names = {c["id"]: c["name"] for c in document["categories"]}
    expected = dict.fromkeys(names.values(), 0)
    for entry in document["annotations"]:
        expected[names[entry["category_id"]]] += 1
    variables = run_example("pyarrow")
    assert variables["counts"] == expected
    page = PAGE.read_text()
    lists = [f.name for f in variables["table"].schema if pa.types.is_list(f.type)]
    assert all(f"| `{name}` | list of " in page for name in lists)


def test_polars(document: dict[str, Any]) -> None:
    ids = [a["image_id"] for a in document["annotations"]]
    most = run_example("polars")["most"]
    assert most["boxes"][0] == max(map(ids.count, ids))
    assert most["boxes"].sum() == len(ids)
