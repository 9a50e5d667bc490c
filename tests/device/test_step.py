"""How a step runs on a device: without waiting for it, compiled as one, in fp16 with a scale."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from tiny_network import batch, build_training, everything, losses
from torch.utils._python_dispatch import TorchDispatchMode

from ssdctl.device import open_device
from ssdctl.device.cpu import Cpu
from ssdctl.device.inductor import resolve_execution
from ssdctl.input.open import copy_ahead
from ssdctl.training.optimizer import INITIAL_SCALE, LossScale
from ssdctl.training.step import NonFiniteGuard

CPU = open_device("cpu")
# What makes the host wait for the device: reading a value, or shapes that depend on one.
WAITS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
    "aten::lift_fresh",  # a constant made of host values: a copy that is waited for
    "aten::_unique2",
    "aten::unique_dim",
}


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.name().partition(".")[0] in WAITS:
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


class Elsewhere(Cpu):
    """A device without readable values, since PyTorch's meta device computes only shapes:
    reading a value raises an error."""

    is_host = False
    supports_found_inf = False

    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("meta")

    def sgd(self, groups: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=lr, momentum=momentum)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.torch_device)


@pytest.fixture
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has none."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_never_waits_for_the_device(accumulate: int, no_autocast: None) -> None:
    for device in (CPU, Elsewhere()):
        _, _, step = build_training(device, clip_grad=10.0)
        batches = [batch(seed=number) for number in range(2)]
        guard = NonFiniteGuard("skip")
        with Waits() as waits:
            for number in range(2):
                result = step([batches[number]] * accumulate, 1e-3)
                guard.watch(number, result.is_bad, [])
        assert waits.found == [], device.torch_device


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    yield
    torch.compiler.reset()


@pytest.mark.slow  # the C++ compiler takes its time
@pytest.mark.filterwarnings("ignore")  # the compiler's own imports warn
def test_compiled_steps_have_the_losses_of_eager_ones(cache: None) -> None:
    compiled = open_device("cpu", execution="compile")
    if compiled.execution != "compile":
        pytest.skip(compiled.notices[0])
    eager = losses(build_training(CPU)[2])
    model, _, step = build_training(compiled)
    assert losses(step) == pytest.approx(eager, rel=1e-5)
    assert step([batch(jitter=float("inf"))], 1e-3).is_bad.item() == 1
    with torch.compiler.set_stance("fail_on_recompile"):
        losses(step, steps=2)
    assert not any(name.startswith("_orig_mod") for name in model.state_dict())


def test_without_compiler_steps_are_eager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    device = open_device("cpu", execution="compile")
    assert device.execution == "eager"
    assert "C++ compiler" in device.notices[0]
    losses(build_training(device)[2], steps=1)


def test_fp16_finds_its_scale_without_an_alarm() -> None:
    """A scale far too high makes gradients infinite; it halves until they are not."""
    model, optimizer, step = build_training(CPU, "fp16")
    state = optimizer.state_dict()
    state["loss_scale"][0] = torch.tensor(2.0**40)
    optimizer.load_state_dict(state)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    results = [step([batch(seed=number)], 1e-3) for number in range(40)]
    assert all(float(r.is_bad) == 0 for r in results)
    infinite = [not torch.isfinite(r.grad_norm).item() for r in results]
    assert infinite[0]
    assert not infinite[-1]
    count = sum(infinite)
    assert infinite == [True] * count + [False] * (40 - count)
    assert optimizer.state_dict()["loss_scale"][0].item() == 2.0 ** (40 - count)
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_fp16_raises_the_alarm_where_the_loss_is_not_finite() -> None:
    _, optimizer, step = build_training(CPU, "fp16")
    assert float(step([batch(jitter=float("inf"))], 1e-3).is_bad) == 1
    assert optimizer.state_dict()["loss_scale"][0].item() == INITIAL_SCALE / 2


def test_fp16_gradients_are_those_of_fp32() -> None:
    norms = []
    for precision in ("fp32", "fp16"):
        _, optimizer, step = build_training(CPU, precision, clip_grad=0)
        state = optimizer.state_dict()
        state["loss_scale"] = [torch.tensor(256.0), torch.tensor(0)]
        optimizer.load_state_dict(state)
        norms.append(float(step([batch()], 1e-3).grad_norm))
    assert norms[0] == pytest.approx(norms[1], rel=2e-2)


def test_scale_stays_above_its_minimum_and_bad_steps_count_there() -> None:
    scale = LossScale(CPU)
    for _ in range(30):
        scale.adapt(torch.tensor(1.0))
    assert scale.scale.item() == 1
    assert not scale.explains(torch.tensor(2.0))


def test_a_host_buffer_is_read_before_the_next_batch_is_decoded_into_it() -> None:
    """Copies of this device read their host memory at the latest possible time."""

    class Late(Cpu):
        is_host = False
        pending: ClassVar[list[tuple[torch.Tensor, torch.Tensor]]] = []

        def copy(self, tensor: torch.Tensor) -> torch.Tensor:
            self.pending.append((torch.empty_like(tensor), tensor))
            return self.pending[-1][0]

        def wait_for_reads(self) -> None:
            for target, source in self.pending:
                target.copy_(source)
            self.pending.clear()

    device = Late()
    images = device.host_buffer((2, 300, 300, 3))

    def reused() -> Iterator[Any]:
        for number in range(4):
            yield batch()._replace(images=images.fill_(number))

    read = [int(copied.images.sum()) for copied in copy_ahead(reused(), device)]
    assert read == [number * images.numel() for number in range(4)]


def test_eager_steps_of_the_host_leave_out_the_padding_and_end_the_same() -> None:
    full = batch()
    full.labels[0] = torch.tensor([0, 2, 0])  # padding before a box stays
    empty = full._replace(labels=torch.zeros_like(full.labels))
    given = [full, empty]
    less = list(copy_ahead(given, open_device("cpu")))
    assert [len(b.boxes[0]) for b in less] == [len(b.labels[0]) for b in less] == [2, 1]
    compiled = Cpu()
    compiled.execution = "compile"
    assert [b.boxes.shape[1] for b in copy_ahead(given, compiled)] == [3, 3]  # one shape
    ends = []
    for batches in (given, less):
        model, optimizer, step = build_training(CPU)
        for one in batches:
            step([one], 1e-2)
        ends.append(everything(model, optimizer))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


def test_a_full_gpu_is_recognized_by_all_its_messages() -> None:
    from ssdctl.device.cuda import Cuda

    device = object.__new__(Cuda)
    words = ("CUDA error: out of memory\nCompile with", "CUBLAS_STATUS_ALLOC_FAILED when calling")
    assert all(device.is_out_of_memory(RuntimeError(text)) for text in words)
    assert device.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    assert not device.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access"))


def test_a_gpu_too_old_for_the_compiler_steps_eagerly() -> None:
    execution, notices = resolve_execution("compile", (6, 1))
    assert execution == "eager"
    assert "Triton needs compute capability 7, the GPU has 6.1" in notices[0]


@pytest.mark.filterwarnings("ignore:Please use the new API:UserWarning")  # reading the switches
def test_tf32_is_off_by_default_and_the_switches_are_restored() -> None:
    """On GPUs PyTorch's own default rounds convolutions to TF32."""
    from ssdctl.device.cuda import Cuda

    def switches() -> tuple[object, ...]:
        cudnn = torch.backends.cudnn
        products = torch.get_float32_matmul_precision()
        return products, cudnn.allow_tf32, cudnn.benchmark, cudnn.benchmark_limit

    device, before = object.__new__(Cuda), switches()  # the switches exist without a GPU
    training, predicting = device.settings(tf32=True), device.settings(tf32=False)
    with training:
        assert switches() == ("high", True, True, 0)
        predicting.__enter__()
        assert switches() == ("highest", False, True, 0)
    assert switches() == ("highest", False, True, 0)  # of the block that is still open
    predicting.__exit__(None, None, None)
    assert switches() == before
