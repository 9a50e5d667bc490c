"""What fits into a device's memory: before a run, after a failure, by count."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import TINY_RUN, Cli
from tiny_network import config, settings

from ssdctl.checkpoint.format import Architecture
from ssdctl.config import TrainConfig
from ssdctl.device.cpu import Cpu
from ssdctl.distributed import SINGLE_PROCESS
from ssdctl.errors import UsageError
from ssdctl.input.batch import Batch
from ssdctl.input.open import random_batch
from ssdctl.model.ssd300 import network_of
from ssdctl.training import memory
from ssdctl.training.memory import (
    MemoryEstimate,
    activation_bytes,
    estimate,
    largest_batch,
    out_of_memory_hints,
)
from ssdctl.training.plan import Plan
from ssdctl.training.step import LossModule

R18 = Architecture("resnet18", "none", 6)
TINY = Architecture("tiny", "none", 6)


def planned(**changes: object) -> Plan:
    return Plan(settings(precision="fp32", **changes), Path(), trainable=1, world_size=1)


@pytest.mark.slow(in_ci=True)
def test_activations_are_what_backward_really_keeps() -> None:
    """Against the storages that a real forward leaves alive."""
    held = []
    for size in (1, 2):
        model = network_of(R18).train()
        loss_module = LossModule(model, Cpu(), "fp32")
        batch = random_batch(size, 6)
        kept: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, torch.Tensor] = kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            loss = loss_module(batch.images, batch.jitter, batch.boxes, batch.labels)[0]
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        held.append(sum(t.untyped_storage().nbytes() for k, t in kept.items() if k not in own))
        del loss
    assert activation_bytes(R18, "fp32") == pytest.approx(held[1] - held[0], rel=0.02)


class Card(Cpu):
    """A CPU that calls itself a card with so much memory, and fails like one.

    It uses 500 MB, 10 MB for each image of a step, and in a network's first step 20 GB more, as a
    search for fast kernels does.
    """

    name = "card"
    is_host = False

    @property
    def precisions(self) -> tuple[str, ...]:
        return ("bf16", "fp32")

    def __init__(self, memory: int | None) -> None:
        super().__init__()
        self.memory = memory
        self.peak = 0

    def memory_bytes(self) -> int | None:
        return self.memory

    def release_memory(self) -> None:
        self.peak = 0

    def peak_memory_bytes(self) -> int:
        return self.peak

    def take_step(self, images: int, *, is_main: bool) -> None:
        if self.memory is not None and 10_000_000 * images > self.memory:
            raise MemoryError
        held = 500_000_000 + 10_000_000 * images
        self.peak = max(self.peak, held + 20_000_000_000 * is_main)


def auto(device: Cpu) -> int:
    return largest_batch(config(), TINY, device, SINGLE_PROCESS, "fp32")


class Step:
    """A step that only allocates memory."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, model: Any, config: TrainConfig, device: Card, *_: object):
        self.device, self.is_main = device, True

    def __call__(self, batches: list[Batch], lr: float) -> None:
        self.sizes.append(len(batches[0].images))
        self.device.take_step(self.sizes[-1], is_main=self.is_main)
        self.is_main = False


@pytest.mark.slow(in_ci=True)
def test_bs_auto_fills_the_memory_by_what_steps_need_once_tuned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The probes are small enough for the memory."""
    monkeypatch.setattr(memory, "build_step", Step)
    # 0.9 x 80 GB less the 500 MB that are always held: 7150 images of 10 MB, in eights.
    assert auto(Card(80_000_000_000)) == 7144
    assert Step.sizes == [16, 16, 48, 48]
    assert auto(Card(600_000_000)) == 4
    with pytest.raises(UsageError, match="does not fit"):  # not even the probes
        auto(Card(50_000_000))
    with pytest.raises(UsageError, match="memory"):
        auto(Card(None))


def test_bs_auto_is_refused_on_the_cpu_and_in_dry_runs(cli: Cli, shapes: Path) -> None:
    options = ["train", "--data", shapes, "--bs", "auto", *TINY_RUN.replace("--bs 2", "").split()]
    cli(*options).expect(2, "--bs 8")
    cli(*options, "--dry-run").expect(2, "--bs 32")
    assert "N|auto" in cli("train", "--bs", "many").err


@pytest.mark.parametrize(
    ("words", "is_memory"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes", True),
        ("could not create a memory object", True),
        ("shapes do not match", False),
    ],
)
def test_an_allocators_error_proposes_what_would_fit(words: str, is_memory: bool) -> None:
    card = Card(4_000_000_000)
    with (
        pytest.raises(UsageError if is_memory else RuntimeError) as caught,
        out_of_memory_hints(planned(batch_size=512), R18, card),
    ):
        raise RuntimeError(words)
    if isinstance(caught.value, UsageError):
        fits = MemoryEstimate.fits(estimate(R18, config(), "fp32"), 4_000_000_000)
        assert "--bs 512" in str(caught.value)
        assert 8 <= fits < 100
        assert f"--bs {fits} would fit" in (caught.value.hint or "")
        assert f"--accumulate {-(-512 // fits)}" in (caught.value.hint or "")


@pytest.mark.parametrize("memory", [40_000_000_000, None])
def test_a_batch_that_fits_by_the_count_is_halved(memory: int | None) -> None:
    """As on a card whose software needs more than network and activations."""
    with (
        pytest.raises(UsageError) as caught,
        out_of_memory_hints(planned(accumulate=2, batch_size=100), R18, Card(memory)),
    ):
        raise RuntimeError("could not create a memory object")
    hint = caught.value.hint or ""
    assert "--bs 48" in hint
    assert "--accumulate 5" in hint
    assert "--bs auto" in hint
