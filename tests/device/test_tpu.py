"""TPU v4 and newer, with a recording fake of TorchTPU (tests/standin_tpu): none was available."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_RUN, Cli
from tiny_network import batch, build_training

from ssdctl.device import open_device
from ssdctl.distributed import torchrun
from ssdctl.errors import UsageError


def test_steps_are_compiled_by_the_packages_backend(
    tpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[dict[str, Any]] = []
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda module, **options: compiled.append(options)
    )
    assert open_device("tpu").execution == "compile"
    build_training(open_device("tpu"))[2]([batch()], 1e-3)
    assert {"backend": "tpu", "dynamic": False} in compiled
    compiled.clear()
    build_training(open_device("tpu", execution="eager"))[2]([batch()], 1e-3)
    assert compiled == []


def test_fp32_is_fp32(tpu: list[str]) -> None:
    """A TPU's own default is `medium`: products of bf16."""
    device, before = open_device("tpu"), torch.get_float32_matmul_precision()
    for tf32, products in ((False, "highest"), (True, "high")):
        with device.settings(tf32=tf32):
            assert torch.get_float32_matmul_precision() == products
        assert torch.get_float32_matmul_precision() == before
    assert device.memory_bytes() == 16 << 30


def test_auto_is_the_tpu(tpu: list[str]) -> None:
    assert open_device("auto").name == ("cuda" if torch.cuda.is_available() else "tpu")


@pytest.mark.parametrize("chip", ["0x0027", None])
def test_without_a_chip_that_it_supports_its_runtime_is_not_started(
    tpu: list[str], pci: Path, chip: str | None
) -> None:
    for device in pci.glob("*/device"):
        device.write_text(f"{chip}\n")
    with pytest.raises(UsageError, match="no TPU v4 or newer"):
        open_device("tpu")
    assert open_device("auto").name != "tpu"


def test_without_the_package_it_is_refused(cli: Cli) -> None:
    result = cli("train", "--device", "tpu", "--fake-data")
    assert (result.code, "torch_tpu" in result.err) == (2, True)


def test_a_run(tpu: list[str], shapes: Path, tmp_path: Path, cli: Cli) -> None:
    options = TINY_RUN.replace("--device cpu", "--device tpu").replace("--fp32", "--bf16").split()
    options += ["--execution", "eager"]
    result = cli("train", "--data", shapes, "--out", tmp_path / "run", "--steps", 1, *options)
    assert result.code == 0, result.err
    assert "TPU v5e" in (tmp_path / "run/environment.json").read_text()


@pytest.mark.parametrize(
    ("options", "call", "number"),
    [
        ("--standalone --nproc-per-node=4", "launch None x 4", None),
        # TorchTPU numbers the hosts of a slice, unless the user does.
        ("--nnodes=2 --rdzv-backend=static --nproc-per-node=4", "launch 2 x 4", "1"),
        ("--nnodes=2 --node-rank=0 --master-addr=a --nproc-per-node=4", "launch 2 x 4", None),
    ],
)
def test_the_variables_of_the_ranks_are_set_before_they_start(
    tpu: list[str], monkeypatch: pytest.MonkeyPatch, options: str, call: str, number: str | None
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "TPU_WORKER_HOSTNAMES": "a,b"})
    torchrun.set_tpu_variables([*options.split(), "-m", "ssdctl", "train"])
    assert tpu == [call]
    assert os.environ["TORCH_TPU_TOPOLOGY"] == "2,2,1"
    assert os.environ["TORCH_TPU_SLICEBUILDER_ADDRESSES"].count(":") == (8 if "2 x" in call else 4)
    assert os.environ.get("PET_NODE_RANK") == number
    assert os.environ.get("PET_MASTER_ADDR") == (number and "a")
