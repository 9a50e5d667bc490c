"""Options of other programs and of `launch`: one error, whose last line is the corrected command."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from conftest import Cli, Result, run_cli

from ssdctl.config.fields import DEVICE_TYPES

# The lines of the seeds' documents and scripts, with the command's name of ssdctl.
DALI = "train --warmup 300 --bs 64 --fp16"
TENSORFLOW = (
    "train -e 64 -b 128 -d {dtype} --model_dir ssd_1_hpu --save_summary_steps 10 "
    "--resnet_checkpoint ssd_r34-mlperf/mlperf_artifact"
)
TENSORFLOW_8 = (
    "launch --allow-run-as-root --bind-to core --map-by socket:PE=6 --np 8 --use_horovod "
    "--epochs 64 --batch_size 128 --dtype bf16 --model_dir ssd_8_hpus --save_summary_steps 10 "
    "--save_checkpoints_epochs 64 --resnet_checkpoint ssd_r34-mlperf/mlperf_artifact"
)
TPU = (
    "train --backbone resnet50 --batch-size 64 --warmup 300 --no-cuda --seed 42 --log-interval=16 "
    "--num_cores=1 --num-workers=8 --suppress_loss_report --save checkpoints "
    "--json-summary checkpoints/summary.json --parallel_loader --accumulation=16"
)
VOYAGER = (
    "launch --hpus 8 --cores-per-node 48 --batch-size 128 --log-interval 100 --val-interval 10 "
    "--use-hpu --hpu-lazy-mode --autocast --warmup 2.619685 --num-workers 12"
)


def corrected(result: Result) -> list[str]:
    """Return the words of the corrected line after `ssdctl`."""
    assert (result.code, result.out) == (2, ""), result
    name, *words = shlex.split(result.err.splitlines()[-1])
    assert name == "ssdctl"
    return words


def plan(words: list[str]) -> dict[str, object]:
    """Return the plan of `train`, as the ranks of a launch would make it."""
    world = "1"
    if words[0] == "launch":
        result = run_cli(*words, "--dry-run", "--json", "--cores-per-node", 48)
        assert result.code == 0, result.err
        (world,) = (words[n + 1] for n, word in enumerate(words) if word in COUNTS)
        argv = json.loads(result.out)["argv"]
        words = [word for word in argv[argv.index("train") :] if word != "--execution=lazy"]
        words = [word for word in words if not word.startswith("--device=")]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": world}.items():
            patch.setenv(name, value)
        result = run_cli(*words, "--dry-run", "--json")
    assert result.code == 0, result.err
    planned: dict[str, object] = json.loads(result.out)
    return planned


COUNTS = {device.count_option for device in DEVICE_TYPES.values()}


@pytest.mark.parametrize(
    ("line", "batch", "total", "warmup", "recipe"),
    [
        (DALI, 64, 65 * 117_266 // 64, 300, "stable-r34"),
        (TENSORFLOW.format(dtype="bf16"), 128, 58_633, 7 * 117_266 // 128, "habana-tf-r34"),
        (TENSORFLOW.format(dtype="fp32"), 128, 58_633, 7 * 117_266 // 128, "habana-tf-r34"),
        (TENSORFLOW_8, 1024, 64 * 117_266 // 1024, 7 * 117_266 // 1024, "habana-tf-r34"),
        (TPU, 1024, 65 * 117_266 // 1024, 300, "nvidia-r50"),
    ],
)
def test_a_line_of_a_replaced_system_ends_in_its_plan_after_one_correction(
    cli: Cli, line: str, batch: int, total: int, warmup: int, recipe: str
) -> None:
    planned = plan(corrected(cli(*line.split())))
    assert planned["global_batch_size"] == batch
    assert (planned["total_steps"], planned["warmup_steps"]) == (total, warmup)
    assert recipe in str(planned["recipe"])


def test_voyagers_line_needs_no_correction() -> None:
    for end in ([], ["--preset", "mlperf-r34", "--end-iteration", "100"]):
        planned = plan([*VOYAGER.split(), *end])
        assert planned["global_batch_size"] == 1024
        assert planned["warmup_steps"] == 299


@pytest.mark.parametrize(
    ("line", "becomes"),
    [
        ("train --hpus 8 --bs 4", "launch --hpus 8 --bs 4"),
        ("train --bs 4 --nodes 2 --gpus 8", "launch --nodes 2 --gpus 8 --bs 4"),
        ("train --launcher slurm --cpus 2 --device cpu", "launch --launcher slurm --cpus 2"),
        ("evaluate --tpus 4 x.pt", "launch --tpus 4 -- evaluate x.pt"),
        ("evaluate x.pt --cluster voyager --hpus 8",
         "launch --cluster voyager --hpus 8 -- evaluate x.pt"),
        ("benchmark train --gpus=2", "launch --gpus=2 -- benchmark train"),
        ("launch --cpus 2 -- evaluate --amp x.pt", "launch --cpus 2 -- evaluate --bf16 x.pt"),
        ("evaluate --mode eval --model_dir a", "evaluate --model_dir a"),
        ("train --mode training --bs 2", "train --bs 2"),
        ("train --mode=eval --model_dir a --epochs 2", "evaluate --model_dir a"),
        ("train --mode evaluation --checkpoint a.pt", "evaluate --checkpoint a.pt"),
        ("train --mode benchmark-inference --data d", "benchmark evaluate --data d"),
        ("train --mode benchmark-training --epochs 2 --bs 2", "benchmark train --bs 2"),
        ("train --mode benchmark-inference -d bf16", "benchmark evaluate --bf16"),
        ("train --inference a.jpg --model_dir m", "predict a.jpg --model_dir m"),
        ("predict a --source b.jpg", "predict a b.jpg"),
        ("train --use-habana-dl --bs 2", "train --preset mlperf-r34 --bs 2"),
        ("train --batch-splits 4 -b 128", "train --preset mlperf-r34 --accumulate 4 --bs 32"),
        ("train --evaluation 21 31 --checkpoint a.pt", "train --eval-at 22,32 --init a.pt"),
        ("train --amp --fp32 --no-cuda", "train --fp32 --device cpu"),
        ("train --nproc_per_node 8 --nnodes 2", "launch --gpus 16 --nnodes 2"),
        ("train --num_cores=8 --no-cuda", "launch --tpus 4 --preset nvidia-r50"),
        ("train --warmup 50", "train --warmup 50st"),
    ],
)  # fmt: skip
def test_options_move_to_where_they_belong(cli: Cli, line: str, becomes: str) -> None:
    assert corrected(cli(*line.split())) == becomes.split()


def test_one_error_lists_all_options(cli: Cli) -> None:
    lines = cli(*TPU.split()).err.splitlines()
    flags = [line.split(":")[0].strip() for line in lines[1:-2]]
    assert flags == ["--warmup", "--no-cuda", "--num_cores", "--suppress_loss_report",
                     "--json-summary", "--parallel_loader"]  # fmt: skip


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


def test_a_folder_of_data_is_no_correction(cli: Cli, tmp_path: Path) -> None:
    result = cli("train", "--amp", "--data", tmp_path / "it's here", "--dry-run")
    assert corrected(result)[1:4] == ["--bf16", "--data", str(tmp_path / "it's here")]


def test_zero_means_never(cli: Cli) -> None:
    options = "--preset mlperf-r34 --val-interval 0 --log-interval 0 --profile 0,0"
    shown = json.loads(cli("config", "show", "--json", *options.split()).out)
    values = [shown[f"train.{key}"]["value"] for key in ("eval_every", "log_every", "profile")]
    assert values == [None, 0, None]


def test_a_warmup_with_its_unit_may_end_after_a_decay(cli: Cli) -> None:
    for warmup in ("50ep", "50st"):
        result = cli("train", "--preset", "nvidia-r50", "--warmup", warmup, "--dry-run")
        assert result.code == 0, result.err


@pytest.mark.parametrize("foreign", ["--num_cores=8", "-n 8", "-np 8", "--nproc-per-node 8"])
def test_a_count_that_is_given_is_not_proposed(cli: Cli, foreign: str) -> None:
    result = cli("launch", "--tpus", 4, *foreign.split())
    problem, _, corrected = result.err.partition("corrected:")
    assert (result.code, "--tpus" in problem, "--gpus" in problem) == (2, False, False)
    assert "--tpus 4" in corrected


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
