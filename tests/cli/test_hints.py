"""Typical mistakes get a hint that works; results name the next command; tables fit a terminal."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import Cli


@pytest.fixture
def _nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = (Path("data/coco"), tmp_path / "absent")
    monkeypatch.setattr("ssdctl.data.store_folder.DEFAULT_ROOTS", roots)


@pytest.mark.usefixtures("_nowhere")
@pytest.mark.parametrize("command", ["train", "prepare"])
def test_no_dataset_at_all(cli: Cli, shapes: Path, command: str) -> None:
    result = cli(command)
    assert result.code == 3
    assert "--data" in result.err.splitlines()[0]
    assert "ssdctl demo" in result.err
    shutil.copytree(shapes, "bolts", ignore=shutil.ignore_patterns("prepared"))
    Path("notes").mkdir()
    result = cli(command)
    assert result.code == 3
    assert "--data bolts" in result.err
    assert "notes" not in result.err


def test_the_image_folder_of_a_dataset(cli: Cli) -> None:
    from PIL import Image

    for folder in ("bolts/images", "bolts/labels"):
        Path(folder).mkdir(parents=True)
    Path("bolts/classes.txt").write_text("bolt\n")
    Path("bolts/labels/a.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    Image.new("RGB", (64, 64)).save("bolts/images/a.jpg")
    result = cli("prepare", "--data", "bolts/images")
    assert (result.code, "--data bolts?" in result.err) == (3, True)
    assert cli("prepare", "--data", "bolts").code == 0


@pytest.mark.parametrize(
    ("options", "fraction"),
    [
        (["prepare", "--split", "80"], "0.8"),
        (["prepare", "--split", "87.5%"], "0.875"),
        (["train", "--target-ap", "35"], "0.35"),
        (["prepare", "--split", "800"], None),
        (["train", "--decay-epochs", "2,x"], None),
    ],
)
def test_a_percentage_for_a_fraction(cli: Cli, options: list[str], fraction: str | None) -> None:
    result = cli(*options)
    assert result.code == 2
    hints = [line for line in result.err.splitlines() if line.startswith("hint: ")]
    assert [hint.split()[-1] for hint in hints] == ([] if fraction is None else [fraction])


def test_a_checkpoint_of_another_program(cli: Cli) -> None:
    import torch

    torch.save({"epoch": 3, "best_fitness": 0.5, "a\x1b[2J" + "b" * 99: 1}, "other.pt")
    result = cli("evaluate", "other.pt")
    assert result.code == 5
    assert "epoch, best_fitness" in result.err
    assert "\x1b" not in result.err
    assert "b" * 41 not in result.err


@pytest.mark.parametrize(
    "command", ["models", "config presets", "fetch-weights --list", "download --dry-run"]
)
def test_tables_fit_80_columns(cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    out = cli(*command.split()).out
    assert max(len(line) for line in out.splitlines() if " http" not in line) <= 80
    assert not set(out) & set("\u2502\u2503\u2501\u2500\u2026")


def test_presets_differ_in_each_row(cli: Cli) -> None:
    recipes = json.loads(cli("config", "presets", "--json").out)
    shown = {line.split()[0] for line in cli("config", "presets").out.splitlines() if line.strip()}
    for path in recipes["stable-r34"]:
        values = {json.dumps(recipe.get(path)) for recipe in recipes.values()}
        assert (path.partition(".")[2] in shown) == (len(values) > 1)


@pytest.mark.parametrize(
    "command",
    [
        "config init mine.toml",
        "models",
        "download --dataset shapes --dest shapes --images 2 --val-images 1",
        "dataset export DATA --to yolo --out yolo",
    ],
)
def test_the_next_command_works(cli: Cli, shapes: Path, command: str) -> None:
    data = Path("data")
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    arguments = command.replace("DATA", str(data)).split()
    result = cli(*arguments)
    assert result.code == 0, result.err
    rows = result.err[result.err.index("next  ") :].splitlines()
    commands = [shlex.split(row.removeprefix("next").strip()) for row in rows]
    assert [words[0] for words in commands] == ["ssdctl"] * len(commands)
    first = [*commands[0][1:], *["--help"] * ("photo.jpg" in commands[0])]
    assert cli(*first).code == 0
    for silent in ("-q", "--json"):
        for made in ("mine.toml", "yolo", "shapes"):
            path = Path(made)
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        assert "next" not in cli(*arguments, silent).err
