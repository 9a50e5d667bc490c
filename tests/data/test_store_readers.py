"""The example in docs/data.md reads the store without ssdctl."""

from pathlib import Path
from typing import Any

import pyarrow as pa
from conftest import Cli
from data.formats.exports import edited
from pages import blocks

PAGE = Path(__file__).parents[2] / "docs" / "data.md"


def test_pyarrow(dataset: Path, cli: Cli) -> None:
    with edited(dataset / "annotations/instances_train2017.json") as content:
        boxes = [a for a in content["annotations"] if a["image_id"] != 1]
        dropped = {**boxes[0], "id": 9999, "image_id": 1, "bbox": [1, 1, 0, 9]}
        content["annotations"] = [*boxes, dropped]
    cli("prepare", "--data", dataset, "--store", "prepared").expect(0)
    names = {c["id"]: c["name"] for c in content["categories"]}
    expected = dict.fromkeys(names.values(), 0)
    for entry in boxes:
        expected[names[entry["category_id"]]] += 1
    (block,) = [b for b in blocks(PAGE) if b.mark == "store: pyarrow"]
    variables: dict[str, Any] = {}
    exec(compile(block.text, str(PAGE), "exec"), variables)
    assert variables["counts"] == expected
    page = PAGE.read_text()
    lists = [f.name for f in variables["table"].schema if pa.types.is_list(f.type)]
    assert all(f"| `{name}` | list of " in page for name in lists)
