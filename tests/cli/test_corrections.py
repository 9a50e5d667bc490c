"""Options of other programs and of `launch`: one message says what to write instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Cli

import ssdctl.cli.main  # noqa: F401  the commands of `click_root`
from ssdctl.cli.help import click_root
from ssdctl.cli.option_aliases import find_row

TPU = (
    "train --backbone resnet50 --batch-size 64 --warmup 300st --no-cuda --seed 42 --num_cores=1 "
    "--log-interval=16 --num-workers=8 --suppress_loss_report --save checkpoints "
    "--json-summary checkpoints/summary.json --parallel_loader --accumulation=16"
)
VOYAGER = (
    "launch --hpus 8 --cores-per-node 48 --batch-size 128 --log-interval 100 --val-interval 10 "
    "--use-hpu --hpu-lazy-mode --autocast --warmup 2.619685 --num-workers 12"
)


def test_voyagers_line_needs_no_correction(cli: Cli) -> None:
    for end in ([], ["--preset", "mlperf-r34", "--end-iteration", "100"]):
        result = cli(*VOYAGER.split(), *end, "--dry-run", "--json")
        assert result.code == 0, result.err
        assert {"--bs=128", "--bf16"} < {*json.loads(result.out)["argv"]}


@pytest.mark.parametrize(
    ("line", "instead"),
    [
        ("train --hpus 8 --bs 4", "--hpus: use ssdctl launch --hpus 8"),
        ("evaluate x.pt --cluster=voyager", "--cluster: use ssdctl launch --cluster voyager"),
        ("launch --cpus 2 -- evaluate --amp x.pt", "--amp: use --bf16 ("),
        ("report --lr .1", "--lr: use ssdctl train --lr .1"),
        ("train --classes a,b", "--classes: use ssdctl prepare --classes a,b"),
        ("launch --gpus 2 --time 60", "--time: use ssdctl launch --set slurm.time=60"),
        ("train --device 1", "--device: use --device cuda (the variable CUDA_VISIBLE_DEVICES"),
        ("train --mode=eval", "--mode: use ssdctl evaluate"),
        ("train --mode benchmark-training", "--mode: use ssdctl benchmark train"),
        ("train --evaluation 21 31", "--evaluation: use --eval-at E,E (with commas, and counted"),
        ("train --multistep 43 54", "--multistep: use --decay-epochs 43,54 (with commas"),
        ("train --nproc_per_node 8", "--nproc_per_node: use ssdctl launch --gpus N ("),
        ("train --batch-splits 4", "--batch-splits: use --accumulate 4 ("),
        ("predict --imgsz=640", "--imgsz: leave it out (every image is resized"),
    ],
)
def test_a_foreign_option_has_its_replacement(cli: Cli, line: str, instead: str) -> None:
    result = cli(*line.split())
    assert (result.code, result.out) == (2, "")
    assert instead in result.err


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("prepare photos", "did you mean --data?"),
        ("download coco", "did you mean --dest?"),
        ("train --batchsize 8", "did you mean --bs?"),
        ("train --learningrate 1", "did you mean --lr?"),
        ("evaluate x.pt --no-verif", "did you mean --no-verify?"),
        ("train --slrum", "`ssdctl train --help` lists all options"),
        ("val", "did you mean 'evaluate'?"),
    ],
)
def test_a_mistyped_line_has_a_hint(cli: Cli, line: str, hint: str) -> None:
    result = cli(*line.split())
    assert result.code == 2
    assert f"\nhint: {hint}" in result.err


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


def test_one_error_lists_all_options(cli: Cli) -> None:
    heading, *lines = cli(*TPU.split()).err.splitlines()
    assert heading == "error: 5 options are not those of ssdctl train:"
    flags = [line.split(":")[0].strip() for line in lines if line.startswith("  --")]
    assert flags == ["--no-cuda", "--num_cores", "--suppress_loss_report", "--json-summary",
                     "--parallel_loader"]  # fmt: skip


@pytest.mark.parametrize("words", [["--local-rank=1", "train"], ["train", "--local_rank=1"]])
def test_a_launchers_local_rank_is_ignored_only_under_a_launcher(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    result = cli(*words, "--dry-run")
    assert (result.code, "LOCAL_RANK" in result.err) == (2, True)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert cli(*words, "--dry-run").code == 0


def test_zero_means_never(cli: Cli) -> None:
    options = "--preset mlperf-r34 --val-interval 0 --log-interval 0 --profile 0,0"
    shown = json.loads(cli("config", "show", "--json", *options.split()).out)
    values = [shown[f"train.{key}"]["value"] for key in ("eval_every", "log_every", "profile")]
    assert values == [None, 0, None]


def test_a_warmup_with_its_unit_may_end_after_a_decay(cli: Cli) -> None:
    for warmup in ("50ep", "50st"):
        result = cli("train", "--preset", "nvidia-r50", "--warmup", warmup, "--dry-run")
        assert result.code == 0, result.err


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ("-e 64.5", "--steps N"),
        ("--set train.warmup=50", "--warmup 50st"),
        ("--warmup 60", "--warmup 60ep"),
        ("--backbone-weights there.ckpt-1.index", "TensorFlow"),
    ],
)
def test_a_mistake_of_other_programs_has_a_hint(cli: Cli, options: str, hint: str) -> None:
    Path("there.ckpt-1.index").touch()
    result = cli("train", *options.split(), "--dry-run")
    assert (result.code, result.out, hint in result.err) == (2, "", True), result.err
