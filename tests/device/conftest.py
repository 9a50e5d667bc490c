"""Devices to test: fakes of Gaudi's bridge and of TorchTPU, torch_xla's CPU client, and a GPU."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ssdctl.device import Device, hpu, open_device
from ssdctl.device import tpu as tpu_device
from ssdctl.runtime import hardware

STANDIN = Path(__file__).parents[1] / "standin"


def let_adam_capture_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins compute there, where PyTorch refuses what it accepts on their devices."""
    for name in ("adam", "adamw"):
        module, supported = sys.modules[f"torch.optim.{name}"], "_get_capturable_supported_devices"
        monkeypatch.setattr(module, supported, lambda *_, **__: ["cpu"], raising=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Put the fake bridge (tests/standin) on the path; return its calls in order."""
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setattr(hpu, "TORCH_DEVICE", "cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    let_adam_capture_on_the_cpu(monkeypatch)
    # Pinned memory needs the card's driver.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, device: self.clone())
    for name in (hpu.MODE, hpu.RECIPES):  # set by the device: undone after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    from habana_frameworks.torch import calls

    yield calls
    calls.clear()
    for name in [n for n in sys.modules if n.startswith("habana_frameworks")]:
        del sys.modules[name]


@pytest.fixture
def pci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let the PCI bus have one TPU v5e; return its devices' folder."""
    folder = tmp_path / "sys/bus/pci/devices"
    (folder / "0").mkdir(parents=True)
    (folder / "0/vendor").write_text("0x1ae0\n")
    (folder / "0/device").write_text("0x0063\n")
    monkeypatch.setattr(hardware, "SYS", tmp_path / "sys")
    return folder


@pytest.fixture
def tpu(monkeypatch: pytest.MonkeyPatch, pci: Path) -> Iterator[list[str]]:
    """Put the fake of TorchTPU (tests/standin_tpu) on the path; return its calls in order."""
    monkeypatch.syspath_prepend(str(STANDIN.with_name("standin_tpu")))
    monkeypatch.setattr(tpu_device, "TORCH_DEVICE", "cpu")
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    for name in ("max_memory_allocated", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.accelerator, name, lambda: 0, raising=False)
    let_adam_capture_on_the_cpu(monkeypatch)
    precision = torch.get_float32_matmul_precision()
    import torch_tpu

    yield torch_tpu.calls
    torch.set_float32_matmul_precision(precision)
    for name in ("torch_tpu", "torch.tpu", "torch.tpu.distributed"):
        del sys.modules[name]


@pytest.fixture(scope="session")
def xla() -> Device:
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip(
            "torch_xla is not installed (extra tpu-xla; .ci/run has an environment with it)"
        )
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    return open_device("xla")
