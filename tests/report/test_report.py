"""The report page stands alone and tells what the run folder holds."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from conftest import Result

Cli = Callable[..., Result]
VOID = {"meta", "link", "img", "br", "hr", "path", "use", "rect"}


class Balanced(HTMLParser):
    """Fails on tags that are closed out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture(scope="module")
def page(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    from conftest import run_cli

    target = tmp_path_factory.mktemp("report") / "report.html"
    result = run_cli("report", tiny_run, "--out", target)
    assert result.code == 0, result.err
    return target.read_text()


def test_page_needs_nothing_else(page: str) -> None:
    Balanced().feed(page)
    sources = re.findall(r'(?:src|href|xlink:href)="([^"]*)"', page)
    assert sources
    assert all(s.startswith(("data:", "#")) for s in sources)
    assert "<script" not in page
    assert "@import" not in page


def test_page_tells_the_run(page: str, tiny_run: Path) -> None:
    for words in ("best AP", "AP ring", "loss_class", "resnet18", "finished", "preset stable-r34"):
        assert words in page, words
    assert page.count("<figure>") == 9  # the validation pictures
    assert page.count("<svg") >= 3


def test_runs_side_by_side(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_run, other)
    result = cli("report", tiny_run, other, "--out", "both.html")
    assert result.code == 0, result.err
    page = Path("both.html").read_text()
    assert '<th class="number">tiny</th><th class="number">other</th>' in page


def test_names_are_escaped(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "<b>bold"
    shutil.copytree(tiny_run, run)
    assert cli("report", run).code == 0
    assert "<b>bold" not in (run / "report.html").read_text()


def test_run_without_checkpoint_or_evaluation(tiny_run: Path, tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    shutil.copytree(tiny_run, run)
    shutil.rmtree(run / "checkpoints")
    (run / "metrics.jsonl").write_text("")
    result = cli("report", run)
    assert result.code == 0, result.err
    assert "no checkpoint yet" in (run / "report.html").read_text()
