"""The names that `--augment` accepts, without importing what they name."""

from __future__ import annotations

from pathlib import Path

from ssdctl.runtime.packages import entry_point_names

LISTS = {
    "ssd": ("crop", "flip", "color"),
    "ssd-zoom": ("zoom", "crop", "flip", "color"),
    "none": (),
}
ENTRY_POINTS = "ssdctl.augmentations"
FOLDER = Path(__file__).parents[1] / "input" / "augmentations"


def names_of(augment: str) -> tuple[str, ...]:
    """Return the augmentations that a comma-separated list of names and of `LISTS` stands for."""
    return tuple(name for part in augment.split(",") for name in LISTS.get(part, (part,)))


def is_file(name: str) -> bool:
    return name.isidentifier() and not name.startswith("_") and (FOLDER / f"{name}.py").is_file()


def problem_of(augment: str) -> str | None:
    """Return what is wrong with a value of `--augment`, if anything."""
    others: list[str] = []
    if unknown := [name for name in names_of(augment) if not is_file(name)]:
        others = entry_point_names(ENTRY_POINTS)
        unknown = [name for name in unknown if name not in others]
    if not unknown:
        return None
    files = sorted(path.stem for path in FOLDER.glob("[!_]*.py"))
    return f"no augmentation {unknown[0]!r}; there are {', '.join([*LISTS, *files, *others])}"
