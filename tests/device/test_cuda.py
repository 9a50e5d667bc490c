"""The step on an NVIDIA GPU. Skipped without one; not run on hardware yet (docs/devices.md)."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN, Cli
from tiny_network import batch, build_training

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.data.open_dataset import open_dataset
from ssdctl.device import Device, open_device
from ssdctl.input.batch import Batch, LoaderConfig
from ssdctl.input.open import copy_ahead, open_input

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
    pytest.mark.filterwarnings("ignore"),  # the compiler's own imports warn
]
OPTIMIZERS = pytest.mark.parametrize("optimizer", ["sgd", "adamw"])


@pytest.fixture(params=["eager", "compile"])
def cuda(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = open_device("cuda", execution=request.param)
    if device.execution != request.param:
        pytest.skip(device.notices[0])
    yield device
    torch.compiler.reset()


@OPTIMIZERS
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_step_never_waits_and_compiles_once(cuda: Device, optimizer: str, precision: str) -> None:
    _, _, step = build_training(cuda, precision, optimizer=optimizer, clip_grad=1.0)
    ahead = copy_ahead((batch(seed=n) for n in range(9)), cuda)
    for _ in range(4):  # compiled, recorded, replayed
        step([next(ahead)], 1e-3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.compiler.set_stance("fail_on_recompile"):
            for number, micro_batch in enumerate(ahead):
                step([micro_batch], 1e-4 * number)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_micro_batches_add_up(cuda: Device) -> None:
    """A CUDA graph writes its gradients into the same memory each time."""
    ends = []
    for device in (open_device("cpu"), cuda):
        model, _, step = build_training(device)
        for number in range(4):
            step([batch(seed=2 * number), batch(seed=2 * number + 1)], 1e-2)
        ends.append({name: tensor.cpu() for name, tensor in model.named_parameters()})
    for name, tensor in ends[0].items():
        torch.testing.assert_close(ends[1][name], tensor, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("pinned", [False, True])
def test_copies_are_intact_after_the_hosts_buffer_is_reused(pinned: bool) -> None:
    device = open_device("cuda")
    shape = (64, 300, 300, 3)
    images = device.host_buffer(shape) if pinned else torch.zeros(shape, dtype=torch.uint8)
    assert images.is_pinned() == pinned

    def reused() -> Iterator[Batch]:
        for number in range(40):
            images.fill_(number)
            yield batch()._replace(images=images)

    for number, copied in enumerate(copy_ahead(reused(), device)):
        assert copied.images.amin() == copied.images.amax() == number


@pytest.mark.skipif(
    not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")),
    reason="the dali extra is not installed",
)
def test_dali_decodes_on_the_gpu_what_the_host_would(shapes: Path) -> None:
    device = open_device("cuda")
    split = open_dataset(shapes, shapes / "prepared")["train"]
    plan = LoaderConfig(seed=7, batch_size=4, threads=2, max_boxes=split.most_boxes)
    source = open_input("dali", split, plan, decoder=device.decoder)
    host = open_input("native", split, plan).batches(0, 8)
    for actual, expected in zip(copy_ahead(source.batches(0, 8), device), host, strict=True):
        assert actual.images.is_cuda
        assert actual.rows.tolist() == expected.rows.tolist()
        difference = (actual.images.cpu().float() - expected.images.float()).abs()
        assert difference.mean() < 2  # nvJPEG rounds otherwise


def test_memory_is_reported_and_freed() -> None:
    device = open_device("cuda")
    device.release_memory()
    before = device.peak_memory_bytes()
    held = torch.empty(256 << 20, dtype=torch.uint8, device=device.torch_device)
    assert device.peak_memory_bytes() >= before + held.numel()
    del held
    device.release_memory()
    assert device.peak_memory_bytes() < before + (256 << 20)
    assert (device.memory_bytes() or 0) > 1 << 30
    with pytest.raises(torch.OutOfMemoryError) as full:
        torch.empty(1 << 44, dtype=torch.uint8, device=device.torch_device)
    assert device.is_out_of_memory(full.value)


@pytest.mark.slow
def test_the_batch_that_fits_is_found_and_runs(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    options = TINY_RUN.replace("--device cpu", "--device cuda").replace("--bs 2", "--bs auto")
    command = ["train", "--data", shapes, "--out", tmp_path / "run", "--steps", 2, *options.split()]
    cli(*command).expect(0)
    assert load_checkpoint(tmp_path / "run/checkpoints/last.pt").global_batch > 16


@pytest.mark.slow
def test_deterministic_runs_are_equal(shapes: Path, tmp_path: Path, cli: Cli) -> None:
    options = [*TINY_RUN.replace("--device cpu", "--device cuda").split(), "--deterministic"]
    try:
        ends = []
        for name in ("a", "b"):
            command = ["train", "--data", shapes, "--out", tmp_path / name, "--steps", 4, *options]
            cli(*command).expect(0)
            ends.append(load_checkpoint(tmp_path / name / "checkpoints/last.pt").model)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(ends[1][name], tensor) for name, tensor in ends[0].items())
