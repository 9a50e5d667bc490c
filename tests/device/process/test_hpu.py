"""Gaudi: a step's operators are in the vendor's table of types. The bridge runs any other one on the
host, which cuts the graph in every step. Recorded below autograd on fake tensors of the CPU.
"""

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
from ssdctl.training.step import build_step

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.int32: "int",
    torch.int64: "int",
    torch.bool: "bool",
}
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

    def __init__(self, execution: str) -> None:
        self.execution = execution
        self.torch_device = torch.device("cpu")

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


@pytest.mark.parametrize(
    ("backbone", "optimizer", "execution"),
    [("resnet18", "sgd", "eager"), ("resnet50", "adamw", "compile"), ("vgg16", "sgd", "eager")],
)
def test_gaudi_has_each_operator_of_a_step(backbone: str, optimizer: str, execution: str) -> None:
    def record() -> None:
        settings = config(optimizer=optimizer, clip_grad=1.0)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = SSD300(backbone, 81).train()
            step = build_step(model, settings, Gaudi(execution), "bf16")
            micro_batch = batch()
            with Unlisted() as unlisted:
                step([micro_batch], 1e-3)
        assert unlisted.seen >= {"convolution_backward", "sort", "argmax", "linalg_vector_norm"}
        assert unlisted.found <= {("clone", "torch.uint8")}  # in the CPU's form of the colors

    # In a fork: it starts autograd's threads, after which no later test could fork.
    fork = ForkedProcess(record)
    _, errors = fork.communicate()
    assert fork.returncode == 0, errors
