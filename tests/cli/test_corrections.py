"""Options of other programs and of `launch`: one message says what to write instead."""

import json
import re
from pathlib import Path

import pytest
from conftest import Cli

import ssdctl.cli.main  # noqa: F401  the commands of `click_root`
from ssdctl.cli.help import click_root
from ssdctl.cli.option_aliases import find_row, refused_options
from ssdctl.config.settings import all_settings


def test_an_option_with_a_wrong_letter_is_recognized() -> None:
    missed, count = [], 0
    for name, command in click_root().commands.items():
        for flag, template in getattr(command, "templates", {}).items():
            for k in range(4, len(flag) - 1, 3) if flag.startswith("--") and len(flag) > 6 else ():
                typed = flag[:k] + flag[k + 1] + flag[k] + flag[k + 2 :]
                if typed in command.templates or find_row(typed, "", is_own=False):
                    continue
                count += 1
                near = command.near_option(typed)
                meant = near.replace(" ", "=").removesuffix("VALUE")
                if meant != flag and not (meant and template.startswith(meant)):
                    missed.append((name, flag, typed))
    assert count > 800
    assert len(missed) < count / 100, missed


@pytest.mark.parametrize("words", [["--local-rank=1", "train"], ["train", "--local_rank=1"]])
def test_a_launchers_local_rank_is_ignored_only_under_a_launcher(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    cli(*words, "--dry-run").expect(2, "LOCAL_RANK")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli(*words, "--dry-run").code == 0


def test_zero_means_never(cli: Cli) -> None:
    options = "--preset mlperf-r34 --val-interval 0 --log-interval 0 --profile 0,0"
    shown = json.loads(cli("config", "show", "--json", *options.split()).out)
    values = [shown[f"train.{key}"]["value"] for key in ("eval_every", "log_every", "profile")]
    assert values == [None, 0, None]


@pytest.mark.parametrize(
    ("alias", "ours"),
    [
        ("-b8", "--bs=8"),
        ("--ebs 4", "--set=evaluate.batch_size=4"),
        ("--save_summary_steps 10", "--log-every=10 --tensorboard"),  # TensorFlow's
        ("--mllog --autocast --out -b", "--mllog=--autocast --out=-b"),  # values, not aliases
        (  # in users' scripts on Voyager
            "-d /dataset --batch-size 128 --log-interval 100 --val-interval 10 --use-hpu "
            "--hpu-lazy-mode --autocast --warmup 2.619685 --num-workers 12",
            "--data=/dataset --bs=128 --log-every=100 --eval-every=10 --execution=lazy --bf16 "
            "--warmup=2.619685 --workers=12",
        ),
    ],
)
def test_launch_replaces_aliases(cli: Cli, alias: str, ours: str) -> None:
    job = "launch --hpus 8 --cores-per-node 48 --dry-run --json"
    argv = json.loads(cli(*job.split(), *alias.split()).expect(0).out)["argv"]
    assert {*argv[argv.index("train") + 1 :]} - {"--device=hpu"} == {*ours.split()}


def test_a_file_that_sets_one_setting_twice_is_refused(cli: Cli) -> None:
    Path("ssdctl.toml").write_text("[train]\nbs = 1\nbatch_size = 2\n")
    cli("config", "show").expect(2, "ssdctl.toml:3", "train.bs")


def test_aliases_are_neither_in_help_nor_options(cli: Cli) -> None:
    settings = [s for s in all_settings().values() if s.section in ("train", "data", "model")]
    flags = [flag for s in settings for flag in s.flags]
    aliases = [alias.partition("=")[0] for s in settings for alias in s.aliases]
    removed = {flag for flag in refused_options() if flag not in flags}
    assert len({*flags, *aliases}) == len([*flags, *aliases])
    keys = [f"{s.section}.{k}" for s in all_settings().values() for k in (s.name, *s.key_aliases)]
    assert len(keys) == len(set(keys))
    words = set(re.findall(r"--[\w-]+", cli("train", "--help").out))
    assert not words & {*aliases, *removed}


@pytest.mark.parametrize(
    "arguments",
    [["--init", ""], ["--out="], ["--batch-size", ""], ["--model_dir="], ["--set="], [""]],
    ids=" ".join,
)
def test_an_unset_variable_of_a_script_is_refused(cli: Cli, arguments: list[str]) -> None:
    """`--init "$CKPT"` must not train from random weights."""
    assert cli("train", "--dry-run", *arguments).expect(2, "is empty").out == ""


def test_an_assignment_may_be_empty(cli: Cli) -> None:
    """It resets what a config file sets."""
    Path("ssdctl.toml").write_text('[train]\ninit = "a.pt"\n')
    result = cli("config", "show", "train.init", "--set", "train.init=", "--json")
    assert json.loads(result.out)["train.init"]["value"] is None
