"""The pages are correct: commands are parsed by the real command line; links, files, options and the
tables of `docs/migrating.md` are compared with the tree. process/test_docs.py runs marked blocks."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.test_command_lines import read
from conftest import Cli
from pages import (
    PAGES,
    ROOT,
    anchors,
    blocks,
    every_page,
    prose,
    rows,
    spans,
    whole_commands,
    words_of,
)
from PIL import Image

from ssdctl.cli import main as cli_main
from ssdctl.cli.option_aliases import AliasCommand
from ssdctl.config import resolve
from ssdctl.config.resolve import PREFIX
from ssdctl.data.formats.coco import read_dataset_toml
from ssdctl.errors import UsageError

MIGRATING = ROOT / "docs" / "migrating.md"


# Options of other programs that the pages mention.
FOREIGN = {"--batch-size", "--hmp-bf16", "--batch-splits", "--accumulation", "--build-arg"}


@pytest.fixture(scope="module")
def root_command() -> Any:
    return cli_main.click_root()


def complaint(words: list[str]) -> str:
    """Return the error of a command that is read, but not run; files of the reader may be absent."""
    return read(*(word for n, word in enumerate(words) if "--config" not in (word, words[n - 1])))


@every_page
def test_commands_are_what_the_command_line_takes(page: Path) -> None:
    for text in whole_commands(page):
        assert not (problem := complaint(words_of(text))), f"{page.name}: {text}: {problem}"
    for text in spans(prose(page)):
        words = words_of(text) if text.startswith("ssdctl ") else []
        if not words or words[0] in ("COMMAND", "--help", "--install-completion"):
            continue
        problem = complaint([word for word in words if word != "--help"])
        # Named in a sentence, not to be typed as it is: arguments may be missing.
        parts = ("missing argument", "missing option", "requires an argument", "Usage:")
        is_short = any(part in problem for part in parts)
        assert not problem or is_short, f"{page.name}: {text}: {problem}"


@every_page
def test_config_files_are_valid(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.kind == "toml" and "[project]" not in block.text:
            path = tmp_path / "block.toml"
            path.write_text(re.sub(r"^ +", "", block.text, flags=re.M))
            if "images =" in block.text:
                assert "train" in read_dataset_toml(path)
            else:
                resolve(file=str(path), environment={})


COCO = {
    "images": [{"id": 1, "file_name": "a.jpg", "width": 160, "height": 120}],
    "annotations": [{"id": 1, "image_id": 1, "category_id": 7, "bbox": [10, 10, 50, 40]}],
    "categories": [{"id": 7, "name": "bolt"}],
}


DATASET = '[train]\nimages = "photos"\nannotations = "labels.json"\n'


# What is wrong, how to make it so, and the message: the table of docs/custom-dataset.md.
MISTAKES: list[tuple[str, str, Any, str]] = [
    ("images without labels", "files", ["a.jpg", "b.jpg"], "these images have no labels"),
    ("an archive that was not unpacked", "files", ["a.zip"], "no dataset found, but 1 .zip file"),
    ("TFRecord files", "files", ["a.tfrecord"], "no dataset found, but 1 TFRecord file"),
    ("a bucket's URL", "url", "s3://bucket/photos", "is a URL, not a local folder"),
    ("a misspelled key", "toml", ("images", "image"), "unknown key 'train.image'"),
    ("a path out of the folder", "toml", ("photos", "../a"), "'../a' is not a plain path below"),
    ("no such annotation file", "toml", ("labels", "label"), "no such annotation file (split train)"),
    ("no such image folder", "toml", ("photos", "fotos"), "no such image folder (split train)"),
    ("images missing", "images", {"file_name": "b.jpg"}, "images are missing, among them b.jpg"),
    ("an id that is not listed, such as 0", "annotations", {"category_id": 0},
     "annotation of a category that is not listed, dropped"),
    ("names as ids", "annotations", {"category_id": "car"}, "Expected int, got str - at"),
    ("width and height swapped", "images", {"width": 120, "height": 160},
     "another size than annotated (160 x 120, not 120 x 160)"),
    ("boxes as left, top, right, bottom", "annotations", {"bbox": [60, 60, 140, 110]},
     "box clipped to its image"),
    ("no box at all", "annotations", {"bbox": [10, 10, 5, -1]},
     "nothing to train on"),
]  # fmt: skip


def test_the_table_of_mistakes_has_these() -> None:
    page = (ROOT / "docs/custom-dataset.md").read_text(encoding="utf-8")
    table = page.partition("| mistake | message |\n|---|---|\n")[2]
    rows = "".join(f"| {name} | `{message}` |\n" for name, _, _, message in MISTAKES)
    assert table.startswith(rows), rows
    assert not table.removeprefix(rows).startswith("|")


@pytest.mark.parametrize(
    ("what", "changes", "message"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES]
)
def test_mistakes_with_data_get_the_message_of_the_page(
    what: str, changes: Any, message: str, tmp_path: Path, cli: Cli
) -> None:
    root: Any = tmp_path / "outside"
    (root / "photos").mkdir(parents=True)
    content = copy.deepcopy(COCO)
    if what == "url":
        root = changes
    elif what == "files":
        for name in changes:
            (root / name).touch()
    else:
        Image.new("RGB", (160, 120)).save(root / "photos/a.jpg")
        if what != "toml":
            content[what][0].update(changes)
        (root / "labels.json").write_text(json.dumps(content))
        old, new = changes if what == "toml" else ("", "")
        (root / "dataset.toml").write_text(DATASET.replace(old, new, 1))
    result = cli("prepare", "--data", root)
    assert result.code in (0, 2, 3)
    assert message in " ".join((result.out + result.err).replace("\u2502", " ").split())


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith(("http:", "https:")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), (page.name, link)
        assert not anchor or anchor in anchors(target), (page.name, link)


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


@pytest.mark.parametrize("page", [*PAGES, ROOT / "benchmarks/RESULTS.md"], ids=lambda p: p.name)
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    code = [*spans(prose(page)), *(w for b in blocks(page) for w in b.text.split())]
    folders = [ROOT / name for name in ("ssdctl", "tests", "benchmarks", "completions", "docs")]
    sources = {path.name for folder in folders for path in folder.rglob("*.py")}
    sources |= {path.name for path in ROOT.glob("*.py")}
    for span in code:
        path, _, test = span.partition("::")
        if re.search(r"[^\w./*-]|NAME", path):
            continue
        if re.match(r"(?:ssdctl|tests|docs|benchmarks|completions|\.ci)/", path):
            assert list(ROOT.glob(path.rstrip("/"))), (page.name, span)
        elif re.fullmatch(r"\w+\.py", path) and path not in ("train.py", "main.py", "ssd.py"):
            assert path in sources, (page.name, span)
        if test:
            assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (page.name, span)


def test_figures_are_those_that_were_measured() -> None:
    results = (ROOT / "benchmarks/RESULTS.md").read_text(encoding="utf-8")
    page = prose(ROOT / "docs/performance.md")
    table = page[page.index("## What is fast") : page.index("## Make your run faster")]
    assert all(row in results for row in table.splitlines() if " ms |" in row)
    rows_of_it = [row.split("|") for row in table.splitlines() if row.startswith("| ")][1:]
    cells = " ".join(cell for row in rows_of_it for cell in row[2:4])  # ours and the compared one
    numbers = re.findall(r"(?<![\w.])\d[\d,.]*\d\b", cells)
    assert len(numbers) > 20
    for number in numbers:
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]\d)", results), number


def options(given: Any) -> Iterator[str]:
    """All options of a command and of those below it."""
    for parameter in given.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    for below in getattr(given, "commands", {}).values():
        yield from options(below)


@every_page
def test_options_that_are_named_exist(page: Path, root_command: Any) -> None:
    text = prose(page)
    if page == MIGRATING:
        text = "\n".join(" | ".join(row[1:]) for row in rows(page))
    names = {*options(root_command), "--help", "--install-completion"} | FOREIGN
    for span in spans(text):
        if span.startswith("--"):
            flags = [word.partition("=")[0] for word in span.split() if word.startswith("--")]
            assert set(flags) <= names, (page.name, span)
        if span.startswith(PREFIX) and "*" not in span:
            assert resolve(environment={span.partition("=")[0]: span.partition("=")[2]})


def test_migration_tables_agree_with_the_command_line(root_command: Any) -> None:
    train = set(options(root_command.commands["train"]))
    entries = list(rows(MIGRATING))
    assert len(entries) > 100
    for foreign, own, _ in entries:
        named = spans(own)
        assert bool(named) is not (own == "none"), (foreign, own)
        for flag in spans(foreign):
            if flag in train:  # the same name and meaning
                assert flag in named, (flag, own)
                continue
            value = "bf16" if "--bf16" in named else "1"  # -d: a folder, or Habana-TF's type
            answer = answer_to(root_command.commands["train"], flag, value)
            assert answer, flag
            if named:
                assert named[0] in answer, (flag, own, answer)


def answer_to(command: AliasCommand, flag: str, value: str) -> str:
    """The options that replace a flag of a replaced system, or why it is refused."""
    for words in ([flag, value], [flag]):
        try:
            rewritten = command.without_aliases(words)
            answer = " ".join(rewritten).replace("--set=train.precision", "--bf16")
            return "" if flag in rewritten else answer
        except UsageError as error:
            reason = str(error)
            if "does not take a value" not in reason:
                break
    return reason
