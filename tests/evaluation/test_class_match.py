"""Classes are matched by name: a new export may renumber and reorder them."""

from __future__ import annotations

import pytest

from ssdctl.data.annotations import ClassName, class_differences, match_classes


def classes(*names: str, first: int = 1) -> list[ClassName]:
    return [ClassName(first + place, name) for place, name in enumerate(names)]


@pytest.mark.parametrize(
    ("known", "listed", "order"),
    [
        (["a", "b"], ["a", "b"], [0, 1]),
        (["a", "b", "c"], ["c", "a", "b"], [1, 2, 0]),
        (["a", "b", "a"], ["b", "a", "a"], [1, 0, 2]),
        (["a", "b"], ["a"], None),
        (["a"], ["a", "a"], None),
        (["a", "b"], ["a", "x"], None),
        ([], [], []),
    ],
)
def test_match(known: list[str], listed: list[str], order: list[int] | None) -> None:
    assert match_classes(classes(*known), classes(*listed, first=100)) == order


def test_only_differences_are_named() -> None:
    text = class_differences(classes("a", "b", "c"), classes("c", "d", "b"))
    assert text == "missing: a; not in the checkpoint: d"
    assert class_differences(classes("a", "b"), classes("b", "a")) == ""
    many = class_differences(classes(*map(str, range(30))), [])
    assert "and 22 more" in many
