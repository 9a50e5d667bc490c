"""A run is settled once: what the user left open follows from device, data and checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY_RUN, Result

from ssdctl.config import Config
from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.config.resolve import Override, Resolved, resolve
from ssdctl.config.sources import Kind, of_call
from ssdctl.distributed.ranks import SINGLE_PROCESS, Ranks
from ssdctl.errors import UsageError
from ssdctl.training.run import Network, finalize

Cli = Callable[..., Result]
FEW, MANY = 100, 117_266
OPTIONS = TINY_RUN.replace("--preset stable-r34 ", "").split()


def settings(**values: object) -> Resolved:
    overrides = [Override(key.replace("__", "."), v, of_call("--x")) for key, v in values.items()]
    return resolve(overrides=overrides, environment={}, default_file=False)


def test_the_rule_for_few_images_uses_the_measured_batch() -> None:
    measured: list[Config] = []

    def largest_batch(config: Config) -> int:
        measured.append(config)
        return 512

    auto = settings(train__batch_size="auto")
    run = finalize(auto, None, SINGLE_PROCESS, FEW, largest_batch=largest_batch)
    same = finalize(settings(train__batch_size=512), None, SINGLE_PROCESS, FEW)
    assert run == same
    assert run.plan.batch_size == run.config.train.batch_size == 512
    assert run.plan.peak_lr == pytest.approx(2e-3)
    assert [config.train.optimizer for config in measured] == ["adamw"]
    with pytest.raises(UsageError, match="--bs auto"):
        finalize(auto, DEVICE_TYPES["cuda"], SINGLE_PROCESS, FEW)


def test_the_network_of_init_replaces_only_what_is_open() -> None:
    network = Network("resnet50", "batch")

    def backbone(**values: object) -> str:
        run = finalize(settings(**values), None, SINGLE_PROCESS, MANY, network=network)
        return run.config.model.backbone

    assert backbone() == "resnet50"
    assert backbone(model__backbone="resnet18") == "resnet18"
    assert backbone(train__preset="stable-r34") == "resnet34"


@pytest.mark.parametrize("kind", [Kind.FILE, Kind.ENVIRONMENT, Kind.CALL])
def test_a_chosen_precision_is_refused_and_a_presets_replaced(kind: Kind) -> None:
    cpu = DEVICE_TYPES["cpu"]
    preset = settings(train__preset="nvidia-r50")
    run = finalize(preset, cpu, SINGLE_PROCESS, MANY)
    assert run.precision != "fp16"
    (notice,) = run.notices
    assert "fp16" in notice
    source = preset.sources["train.precision"]._replace(kind=kind)
    with pytest.raises(UsageError, match="fp16"):
        finalize(preset.with_value("train.precision", "fp16", source), cpu, SINGLE_PROCESS, MANY)


def test_batch_norm_of_a_single_image_is_refused() -> None:
    norm = {"model__extra_norm": "batch"}
    with pytest.raises(UsageError, match="--bs 1"):
        finalize(settings(train__batch_size=1, **norm), None, SINGLE_PROCESS, MANY)
    for ranks, values in (
        (SINGLE_PROCESS, {"train__batch_size": 2, **norm}),
        (SINGLE_PROCESS, {"train__batch_size": 1}),
        (Ranks(0, 2, 0), {"train__batch_size": 1, "train__sync_bn": True, **norm}),
    ):
        batch_size = finalize(settings(**values), None, ranks, MANY).plan.batch_size
        assert batch_size == values["train__batch_size"]
    rule = finalize(settings(**norm), None, Ranks(0, 16, 0), FEW)
    assert rule.plan.batch_size == 2


def test_limits_and_ranks_are_part_of_the_plan() -> None:
    run = finalize(settings(train__overfit=3, train__limit_train=5), None, Ranks(0, 2, 0), FEW)
    assert run.plan.images == 3
    assert run.plan.global_batch_size == 8


@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    [["--overfit", "2"], ["--limit-train", "7"], ["--overfit", "5", "--limit-train", "3"]],
)
def test_the_dry_run_plans_what_is_trained(cli: Cli, shapes: Path, options: list[str]) -> None:
    command = ["train", "--data", shapes, "--out", "run", *OPTIONS, "--steps", 1, *options]
    plan = json.loads(cli(*command, "--dry-run", "--json").out)
    assert not Path("run").exists()
    assert cli(*command).code == 0
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    started = records[0]
    assert plan["images"] == started["train_images"]
    assert plan["global_batch_size"] == started["global_batch_size"]


@pytest.mark.process
def test_the_dry_run_plans_the_network_of_init(cli: Cli, shapes: Path, checkpoint: Path) -> None:
    def size(*options: object) -> str:
        result = cli("train", "--data", shapes, "--dry-run", *options)
        assert result.code == 0, result.err
        (line,) = [line for line in result.out.splitlines() if line.startswith("checkpoints")]
        return line.split()[1]

    tiny = ["--backbone", "tiny", "--backbone-weights", "none"]
    assert size("--init", checkpoint) == size(*tiny) != size()
