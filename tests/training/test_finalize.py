"""A run is settled once: what the user left open follows from device, data and checkpoint."""

from __future__ import annotations

from typing import get_type_hints

import msgspec
import pytest

from ssdctl.config import Config
from ssdctl.config.devices import DEVICE_TYPES
from ssdctl.config.resolve import Override, Resolved, Settled, resolve
from ssdctl.config.sources import Kind, of_call
from ssdctl.distributed.ranks import SINGLE_PROCESS, Ranks
from ssdctl.errors import UsageError
from ssdctl.training.run import Network, finalize

FEW, MANY = 100, 117_266


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
    with pytest.raises(msgspec.ValidationError):  # a settled run cannot hold `auto`
        Settled.of(auto)
    assert get_type_hints(type(run.config.train))["batch_size"] is int


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
