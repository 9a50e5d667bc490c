"""Devices to test: the fake of Gaudi's bridge, torch_xla's CPU client, and a GPU if there is one."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ssdctl.device import Device, hpu, open_device

STANDIN = Path(__file__).parents[1] / "standin"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Put the fake bridge (tests/standin) on the path; return its calls in order."""
    monkeypatch.syspath_prepend(str(STANDIN))
    monkeypatch.setattr(hpu, "TORCH_DEVICE", "cpu")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    # The stand-in computes on the CPU, where PyTorch's AdamW refuses what it accepts on "hpu".
    for name in ("adam", "adamw"):
        module = sys.modules[f"torch.optim.{name}"]
        supported = "_get_capturable_supported_devices"
        monkeypatch.setattr(module, supported, lambda *_, **__: ["cpu"], raising=False)
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


@pytest.fixture(scope="session")
def xla() -> Device:
    if importlib.util.find_spec("torch_xla") is None:
        pytest.skip("torch_xla is not installed (extra tpu; .ci/run has an environment with it)")
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    return open_device("xla")
