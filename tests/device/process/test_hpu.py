"""Gaudi: the bridge is loaded late, and a step's operators are in the vendor's table of types.

The bridge runs any other operator on the host, which cuts the graph in every step. Recorded below
autograd on fake tensors of the CPU; what the vendor's compiler makes of them is not known here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import ForkedProcess
from tiny_network import batch, config
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ssdctl.device import hpu
from ssdctl.model.ssd300 import SSD300
from ssdctl.training.step import LossModule, build_step

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int32: "int",
    torch.int64: "int",
    torch.bool: "bool",
}
STANDIN = Path(__file__).parents[2] / "standin"
LINES = (Path(__file__).parents[1] / "gaudi_operators.txt").read_text().splitlines()
ROWS = [line.partition(":") for line in LINES if not line.startswith("#")]
TABLE = {name: types.split() for types, _, names in ROWS for name in names.split()}
NAMES = {"to_copy": "to", "linalg_vector_norm": "norm"}  # in the table
ALLOWED = {
    ("to_copy", "torch.uint8"),  # habana_kernels/kernel_utils.cpp
    ("mul", "bool"),  # in `isfinite`, which is one operator of the bridge
}
NOT_COMPUTED = {"index", "indices", "condition"}  # arguments of other types than the values


class Gaudi(hpu.Hpu):
    """Chooses as on Gaudi, and computes elsewhere without the bridge."""

    def __init__(self, execution: str, where: str, forms: tuple[str, ...] | None = None) -> None:
        self.execution = execution
        self.torch_device = torch.device(where)
        self._forms = forms

    @property
    def forms(self) -> tuple[str, ...]:
        return super().forms if self._forms is None else self._forms

    def compile(self, module: torch.nn.Module, *, overlap: bool = False) -> None:
        pass


class Unlisted(TorchDispatchMode):
    """Collects the operators that are not in the table, with their type."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()
        self.found: set[tuple[str, str]] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2].strip("_")
        if func.is_view or func.namespace != "aten" or name in ("detach", "unsafe_view"):
            return result  # they compute nothing
        self.seen.add(name)
        names = [argument.name for argument in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        values = [value for key, value in given.items() if key not in NOT_COMPUTED]
        tensors = [t for t in tree_leaves(values) or tree_leaves(result) if isinstance(t, Tensor)]
        listed = TABLE.get(name) or TABLE.get(NAMES.get(name, name.removesuffix("_backward")), [])
        for tensor in tensors:
            kind = TYPES.get(tensor.dtype, str(tensor.dtype))
            if kind not in listed and (name, kind) not in ALLOWED:
                self.found.add((name, kind))
        return result


def run_in_fork(work: Callable[[], None]) -> None:
    """Run it in a fork: it starts autograd's threads, after which no later test could fork."""
    fork = ForkedProcess(work)
    _, errors = fork.communicate()
    assert fork.returncode == 0, errors


@pytest.mark.parametrize(
    ("backbone", "optimizer", "execution"),
    [("resnet18", "sgd", "eager"), ("resnet50", "adamw", "compile"), ("vgg16", "sgd", "eager")],
)
def test_gaudi_computes_each_operator_of_a_step(
    backbone: str, optimizer: str, execution: str
) -> None:
    def record() -> None:
        settings = config(optimizer=optimizer, clip_grad=1.0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = SSD300(backbone, 81).train()
            step = build_step(model, settings, Gaudi(execution, "cpu"), "bf16")
            micro_batch = batch()
            with Unlisted() as unlisted:
                step([micro_batch], 1e-3)
        assert unlisted.seen >= {"convolution_backward", "sort", "argmax", "linalg_vector_norm"}
        assert unlisted.found <= {("clone", "torch.uint8")}  # in the CPU's form of the colors

    run_in_fork(record)


@pytest.mark.parametrize("forms", [None, ()])
def test_a_scatter_of_integers_would_run_on_the_host(forms: tuple[str, ...] | None) -> None:
    """On the meta device, where the colors are computed as on accelerators."""

    def backward() -> None:
        torch.autocast = lambda *_, **__: contextlib.nullcontext()
        with torch.device("meta"):
            module = LossModule(SSD300("resnet18", 81), Gaudi("eager", "meta", forms), "fp32")
        micro_batch = batch()
        inputs = (micro_batch.images, micro_batch.jitter, micro_batch.boxes, micro_batch.labels)
        with Unlisted() as unlisted:
            module(*(tensor.to("meta") for tensor in inputs))[0].backward()
        assert unlisted.found == (set() if forms is None else {("scatter_reduce", "int")})

    run_in_fork(backward)


AUTOLOAD = """
import subprocess
import sys
import torch
print("habana_frameworks.torch.core" in sys.modules)
from ssdctl.device import hpu, open_device
from ssdctl.errors import UsageError

hpu.TORCH_DEVICE = "cpu"
try:
    print(open_device("hpu", execution="compile").execution)
except UsageError as error:
    print("refused", error)
"""


@pytest.mark.parametrize(
    ("autoload", "loaded", "opened"), [("0", "False", "compile"), ("1", "True", "refused")]
)
def test_a_bridge_that_is_loaded_in_another_mode_is_refused(
    tmp_path: Path, autoload: str, loaded: str, opened: str
) -> None:
    variables = {k: v for k, v in os.environ.items() if k not in (hpu.MODE, "PT_HPU_AUTOLOAD")}
    path = os.pathsep.join([str(STANDIN), os.environ.get("PYTHONPATH", ""), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", AUTOLOAD],
        env={**variables, "PT_HPU_AUTOLOAD": autoload, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert [lines[0], lines[1].split()[0]] == [loaded, opened], done.stderr
