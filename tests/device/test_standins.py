"""Gaudi, and TPU v4 and newer, with recording fakes of their packages (tests/standin, tests/standin_tpu)."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY_RUN, Cli
from tiny_network import batch, build_training

from ssdctl.device import hpu, open_device
from ssdctl.distributed import Ranks, torchrun
from ssdctl.distributed import process_group as joining
from ssdctl.distributed.process_group import process_group
from ssdctl.errors import UsageError


def test_lazy_steps_are_marked_after_backward_and_after_the_optimizer(calls: list[str]) -> None:
    device = open_device("hpu")
    assert device.execution == "lazy"
    _, _, step = build_training(device)
    assert calls == []
    step([batch()], 1e-3)
    assert calls == ["mark_step", "mark_step"]
    calls.clear()
    step([batch(), batch()], 1e-3)
    assert calls == ["mark_step", "mark_step", "mark_step"]


def test_eager_steps_are_not_marked(calls: list[str]) -> None:
    build_training(open_device("hpu", execution="eager"))[2]([batch()], 1e-3)
    assert calls == []


def test_mode_and_recipe_cache_are_set_before_the_import(calls: list[str], tmp_path: Path) -> None:
    before = {**os.environ}
    device = open_device("hpu", execution="compile")
    assert os.environ == before
    from habana_frameworks.torch import environment

    assert environment[hpu.MODE] == "0"
    folder, delete, _ = environment[hpu.RECIPES].split(",")
    assert Path(folder) == tmp_path / f"ssdctl-{os.getuid()}" / "hpu"  # on this machine's disk
    assert delete == "false"  # a resumed run finds its graphs there
    assert Path(folder).parent.stat().st_mode & 0o777 == 0o700
    with device.settings(tf32=False):
        assert {n: os.environ[n] for n in (hpu.MODE, hpu.RECIPES)}.items() <= environment.items()
    assert os.environ == before
    assert open_device("hpu").execution == "compile"  # the mode that the bridge has now
    with pytest.raises(UsageError, match="already loaded in eager mode"):
        open_device("hpu", execution="lazy")


@pytest.mark.parametrize(
    ("release", "execution"), [("1.21.0.555", "lazy"), ("1.22.1.6", "compile"), (None, "lazy")]
)
def test_the_release_decides_how_steps_run(
    calls: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    release: str | None,
    execution: str,
) -> None:
    if release is not None:
        folder = tmp_path / f"habana_torch_plugin-{release}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: habana-torch-plugin\nVersion: {release}\n"
        (folder / "METADATA").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
    assert open_device("hpu").execution == execution
    for mode, chosen in (("1", "lazy"), ("0", "compile")):  # the user's own choice
        del sys.modules["habana_frameworks.torch.core"]  # as if it were not loaded yet
        monkeypatch.setenv(hpu.MODE, mode)
        assert open_device("hpu").execution == chosen


def test_ranks_get_card_and_backend(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # as under srun, which sets other variables
        monkeypatch.setenv(name, "")  # set by the joining: undone after the test
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_PORT", "0")
    device = open_device("hpu")
    joined: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda backend, **_: joined.append((backend, [*calls])),
    )
    # The other rank has joined, in a store in memory; the group is None.
    store = torch.distributed.HashStore()
    monkeypatch.setattr(joining, "_groups", iter(["first"]))
    torch.distributed.PrefixStore("group-first", store).add(joining.ARRIVED, 1)
    met = iter([(store, 0, 2)])
    monkeypatch.setattr(joining, "torch_rendezvous", lambda *_, **__: met)
    monkeypatch.setattr(torch.distributed, "new_group", lambda **_: None)
    with process_group(Ranks(0, 2, 0), device):
        pass
    assert joined == [("cpu:gloo,hpu:hccl", ["card of rank 0 of 2"])]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        ("synStatus=8 [Device not found] Device acquire failed.", "another process"),
        ("synStatus=8 Device acquire failed. No devices found.", "no Gaudi card"),
    ],
)
def test_a_busy_card_is_distinguished_from_none(
    calls: list[str], monkeypatch: pytest.MonkeyPatch, error: str, expected: str
) -> None:
    device = open_device("hpu")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(error)

    monkeypatch.setattr(torch.nn.Module, "to", fail)
    with pytest.raises(UsageError, match=expected) as caught:
        build_training(device)
    assert "hl-smi" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("fixture", "device", "label"),
    [("calls", "hpu", "Intel Gaudi"), ("tpu", "tpu --execution eager", "TPU v5e")],
)
def test_a_run(
    fixture: str, device: str, label: str, request: pytest.FixtureRequest, shapes: Path, cli: Cli
) -> None:
    """Through the command line: train, evaluate and save."""
    calls = request.getfixturevalue(fixture)
    options = TINY_RUN.replace("cpu", device).replace("--fp32", "--bf16").split()
    cli("train", "--data", shapes, "--out", "run", "--steps", 1, *options).expect(0)
    assert fixture == "tpu" or calls.count("mark_step") > 1
    assert label in Path("run/environment.json").read_text()


def test_the_package_compiles_steps(tpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
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
