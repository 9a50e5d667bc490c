"""The completion scripts are up to date and complete commands; the man pages are well-formed."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ssdctl.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]


GENERATOR = runpy.run_path(str(ROOT / "completions" / "generate.py"))


def ask(shell: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "_SSDCTL_COMPLETE": f"complete_{shell}", **variables}
    return subprocess.run(
        [sys.executable, "-m", "ssdctl"], capture_output=True, text=True, env=environment
    )


def complete(line: str) -> list[str]:
    """Return the completions in bash, which treats '=' as a separate word."""
    words = line.replace("=", "\n=\n").replace(" ", "\n")
    done = ask("bash", COMP_WORDS=words, COMP_CWORD=str(words.count("\n")))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(("name", "shell"), GENERATOR["FILES"].items())
def test_scripts_are_not_stale(name: str, shell: str) -> None:
    assert (ROOT / "completions" / name).read_text() == GENERATOR["script"](shell)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ssdctl ev", {"evaluate"}),
        ("ssdctl train --preset=mlp", {"mlperf-r34"}),
        ("ssdctl train --set train.clip", {"train.clip_grad="}),
        ("ssdctl train --epochs 3 --backbone resnet1", {"resnet18", "resnet101", "resnet152"}),
        ("ssdctl launch --cpus 2 -- evaluate --spl", {"--split"}),
        (
            "ssdctl launch --cpus 2 --learning-rate 1 --fre",
            {"--freeze", "--freeze-norm", "--freeze-stem"},
        ),
        ("ssdctl train --batch-splits 3 --warm", {"--warmup"}),  # a refused flag
        ("ssdctl train 'unclosed --warm", {"--warmup"}),
        ("ssdctl train --augment ssd,", set()),  # nothing that it lacks
        ("ssdctl predict ssd", {"ssd300-vgg16-coco"}),
        ("ssdctl train --data ", set()),  # the shell offers files
    ],
)
def test_words_complete(line: str, expected: set[str]) -> None:
    assert set(complete(line)) == expected


def test_a_word_before_others_completes() -> None:
    done = ask("bash", COMP_WORDS="ssdctl\ntrain\n--preset\n\n--lr\n3", COMP_CWORD="3")
    assert "mlperf-r34" in done.stdout.split()


def test_run_folders_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("runs/first", "runs/second", "demo/run", "runs/$(touch pwned)"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    assert set(complete("ssdctl evaluate ")) == {"runs/first", "runs/second", "demo/run"}
    assert complete("ssdctl train --out runs/s") == ["runs/second"]
    assert complete("ssdctl evaluate runs/first/ch") == []  # a file in it: the shell's affair


def test_output_has_the_format_of_each_shell() -> None:
    line = {"_TYPER_COMPLETE_ARGS": "ssdctl train --preset=mlp"}
    assert ask("zsh", **line).stdout == """_arguments '*: :(("--preset=mlperf-r34"))'\n"""
    assert ask("fish", _TYPER_COMPLETE_FISH_ACTION="get-args", **line).stdout == (
        "--preset=mlperf-r34\n"
    )
    assert ask("fish", _TYPER_COMPLETE_FISH_ACTION="is-args", **line).returncode == 0
    line = {"_TYPER_COMPLETE_ARGS": "ssdctl train --data x"}
    assert ask("zsh", **line).stdout == "_files\n"
    assert ask("fish", _TYPER_COMPLETE_FISH_ACTION="is-args", **line).returncode == 1


def test_a_tab_imports_neither_torch_nor_rich() -> None:
    words = {"COMP_WORDS": "ssdctl\ntrain\n--", "COMP_CWORD": "2", "PYTHONPROFILEIMPORTTIME": "1"}
    done = ask("bash", **words)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "ssdctl.cli.main" in imported
    assert not imported & {"rich", "numpy", "requests", "torch"}


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_the_first_tab_of_zsh_completes(tmp_path: Path) -> None:
    """Compinit loads the script by calling it at the first completion."""
    program = tmp_path / "ssdctl"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ssdctl "$@"\n')
    program.chmod(0o755)
    script = (
        f"fpath=({ROOT / 'completions'}); path=({tmp_path} $path); compdef() {{ }}; "
        '_arguments() { print -r -- "$@" }; autoload -U _ssdctl; '
        "words=(ssdctl eval); CURRENT=2; _ssdctl; _ssdctl"
    )
    done = subprocess.run(["zsh", "-fc", script], capture_output=True, text=True)
    assert done.stdout.count("evaluate") == 2, done.stderr


@pytest.mark.skipif(shutil.which("man") is None, reason="man is not installed")
def test_each_command_has_a_page_without_warnings(tmp_path: Path) -> None:
    for name, text in runpy.run_path(str(ROOT / "docs" / "man_pages.py"))["pages"]().items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    pages = sorted(tmp_path.iterdir())
    assert len(pages) > len(COMMANDS)
    done = subprocess.run(
        ["man", "--warnings", "-l", "-Tutf8", *map(str, pages)], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert "warmup" in done.stdout
