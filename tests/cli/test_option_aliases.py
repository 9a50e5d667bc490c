"""Options that people type from memory: standard spellings, and those of other programs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import Cli

from ssdctl.cli.option_aliases import refused_options
from ssdctl.config.settings import all_settings

EIGHT_CARDS = ["launch", "--hpus", "8", "--cores-per-node", "48", "--dry-run", "--json"]


def ranks_options(cli: Cli, *arguments: str) -> set[str]:
    """The options that `launch` passes to the ranks' `train`."""
    result = cli(*EIGHT_CARDS, *arguments)
    assert result.code == 0, result.err
    argv = json.loads(result.out)["argv"]
    return set(argv[argv.index("train") + 1 :]) - {"--device=hpu"}


@pytest.mark.parametrize(
    ("alias", "ours"),
    [
        ("-b8", "--bs=8"),
        ("--dtype bf16", "--bf16"),
        ("--threshold 0.23", "--target-ap=0.23"),
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
    assert ranks_options(cli, *alias.split()) == set(ours.split())


def test_commands_without_a_run_take_output_dir_too(cli: Cli) -> None:
    result = cli("download", "--dataset", "shapes", "--images", 1, "--output_dir", "s", "--dry-run")
    assert (result.code, result.out[:2]) == (0, "s:"), result.err


@pytest.mark.parametrize(
    ("command", "option", "remedy"),
    [
        ("train", "--multistep", "--decay-epochs"),
        ("train", "-d=bf16", "--bf16"),
        ("train", "--fp32 --bf16", "--bf16 and --fp32"),
        ("launch", "--use_horovod", "not needed"),
        ("train", "--hmp", "PT_HPU_AUTOCAST_FP32_OPS_LIST"),
        ("train", "--hmp-bf16=ops.txt", "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST"),
        ("launch", "--hmp-fp32=ops.txt", "PT_HPU_AUTOCAST_FP32_OPS_LIST"),
        ("launch", "-np", "--hpus"),
        ("launch", "--tag-output", "RUN/logs"),
        ("train", "--num-cropping-iterations", "one attempt"),
        ("train", "--warmup-factor", "starts at 0"),
        ("train", "--use-hpu=3", "does not take a value"),
        ("train", "--use_horovod", "ssdctl launch"),
        ("train", "-v 5", "--log-every 5"),
        ("train", "-v5", "--log-every 5"),
        ("launch", "-v 5", "--log-every 5"),
        ("train", "--profile 9012", "--profile 50,53"),
        ("train", "--profile=9012", "--profile 50,53"),
        ("train", "--set train.profile=9012", "FIRST,LAST"),
        ("train", "--batch-size", "requires a value"),
        ("predict", "--imgsz=640", "300 x 300"),
        ("predict", "--source=x.jpg", "predict CKPT IMAGE"),
        ("evaluate", "--source=d", "--data"),
    ],
)
def test_options_without_the_same_meaning_are_refused_with_a_remedy(
    cli: Cli, command: str, option: str, remedy: str
) -> None:
    result = cli(command, *option.split())
    assert result.code == 2
    typed = re.split("[= ]|(?<=^-v)", option)[0]
    assert typed in result.err
    assert remedy in result.err
    assert "No such option" not in result.err
    assert result.out == ""


@pytest.mark.parametrize("command", ["predict", "evaluate"])
@pytest.mark.parametrize("flag", ["--threshold", "--confidence", "--conf", "--iou"])
def test_thresholds_have_the_names_of_other_detectors(cli: Cli, command: str, flag: str) -> None:
    images = ["x.jpg"] if command == "predict" else []
    result = cli(command, flag, "0.5", "--weights", "absent.pt", *images)
    assert (result.code, "absent.pt" in result.err) == (2, True)
    assert "<= 1.0" in cli(command, "absent.pt", *images, flag, "5").err


def test_a_file_that_sets_one_setting_twice_is_refused(cli: Cli) -> None:
    Path("ssdctl.toml").write_text("[train]\nbs = 1\nbatch_size = 2\n")
    result = cli("config", "show")
    assert result.code == 2
    assert "ssdctl.toml:3" in result.err
    assert "train.bs" in result.err


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
    result = cli("train", "--dry-run", *arguments)
    assert (result.code, result.out) == (2, "")
    assert "is empty" in result.err


def test_an_assignment_may_be_empty(cli: Cli) -> None:
    """It resets what a config file sets."""
    Path("ssdctl.toml").write_text('[train]\ninit = "a.pt"\n')
    result = cli("config", "show", "train.init", "--set", "train.init=", "--json")
    assert json.loads(result.out)["train.init"]["value"] is None
    rows = cli(
        "config", "show", "train.init", "train.seed", "--set", "train.init="
    ).out.splitlines()
    assert [row.split()[:2] for row in rows if row.startswith("train.")] == [
        ["train.init", "-"],
        ["train.seed", "0"],
    ]
