"""Classes are matched by name: a new export may renumber and reorder them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_RUN, Cli


def exported_again(shapes: Path, root: Path, *, reverse: bool) -> dict[int, int]:
    """Copy a dataset with other category ids; return the new ids by the old ones."""
    shutil.copytree(shapes, root, ignore=shutil.ignore_patterns("prepared"))
    new: dict[int, int] = {}
    for path in root.glob("annotations/*.json"):
        content: dict[str, Any] = json.loads(path.read_text())
        new = {c["id"]: 1000 - 10 * c["id"] for c in content["categories"]}
        for category in content["categories"]:
            category["id"] = new[category["id"]]
        for entry in content["annotations"]:
            entry["category_id"] = new[entry["category_id"]]
        if reverse:
            content["categories"].reverse()
        path.write_text(json.dumps(content))
    return new


def test_evaluation_matches_by_name(
    cli: Cli, checkpoint: Path, shapes: Path, tmp_path: Path
) -> None:
    root = tmp_path / "again"
    new = exported_again(shapes, root, reverse=True)
    options = ("--device", "cpu", "--score-threshold", "0.01", "--json", "--verify")
    before = cli("evaluate", checkpoint, "--data", shapes, *options, "--detections", "before.json")
    after = cli("evaluate", checkpoint, "--data", root, *options, "--detections", "after.json")
    assert after.code == 0, after.err
    expected, actual = json.loads(before.out), json.loads(after.out)
    assert actual["AP"] == pytest.approx(expected["AP"], abs=1e-12)
    objects = {c["name"]: c["objects"] for c in expected["per_class"]}
    assert {c["name"]: c["objects"] for c in actual["per_class"]} == objects
    rows = [json.loads(Path(name).read_text()) for name in ("before.json", "after.json")]
    assert len(rows[0]) > 0
    for row in rows[0]:
        row["category_id"] = new[row["category_id"]]
    assert rows[0] == rows[1]

    for path in root.glob("annotations/*.json"):
        path.write_text(path.read_text().replace('"star"', '"comet"'))
    refused = cli("evaluate", checkpoint, "--data", root, *options)
    assert refused.code == 5
    message = " ".join(refused.err.split())
    assert "missing: star; not in the checkpoint: comet" in message
    assert "brick" not in message


def test_a_run_resumes_with_renumbered_classes(
    cli: Cli, tiny_run: Path, shapes: Path, tmp_path: Path
) -> None:
    exported_again(shapes, tmp_path / "again", reverse=False)
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    train = ("train", "--out", run, *TINY_RUN.split())
    result = cli(*train, "--data", tmp_path / "again", "--steps", 4)
    assert result.code == 0, result.err
    assert "category ids differ" in result.err
    exported_again(shapes, tmp_path / "reversed", reverse=True)
    refused = cli(*train, "--data", tmp_path / "reversed", "--steps", 5)
    assert refused.code == 5
    assert "another order" in refused.err
    assert "--init" in refused.err
