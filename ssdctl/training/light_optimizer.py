"""PyTorch's optimizers without importing torch._dynamo, which takes 5 to 9 seconds of CPU time.

The methods of `torch.optim.Optimizer` import it so that torch.compile leaves them out of a graph;
an eager run has no graph. If PyTorch's internals differ, only the time changes.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator

import torch

# Each is wrapped by torch._compile._disable_dynamo, which imports torch._dynamo unless the function
# has this attribute: its counterpart that the compiler leaves out.
_COMPILER_ENTRY = "__dynamo_disable"
_WRAPPED_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")


@contextlib.contextmanager
def without_dynamo() -> Iterator[None]:
    """Let the optimizers' methods run as plain functions during the block.

    If torch._dynamo is imported already, nothing changes.
    """
    changed = []
    if not _is_dynamo_imported():
        for name in _WRAPPED_METHODS:
            function = inspect.unwrap(getattr(torch.optim.Optimizer, name))
            if not hasattr(function, _COMPILER_ENTRY):
                setattr(function, _COMPILER_ENTRY, function)
                changed.append(function)
    try:
        yield
    finally:
        for function in changed:
            if getattr(function, _COMPILER_ENTRY, None) is function:
                delattr(function, _COMPILER_ENTRY)


def step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step, by the undecorated method if torch._dynamo is not imported.

    The decorators set the gradient mode, name the step for profilers, break the compiler's graph
    and run step hooks. Optimizers of vendors keep their decorators.
    """
    if _is_dynamo_imported() or not type(optimizer).__module__.startswith("torch.optim."):
        optimizer.step()
        return
    profile_name = f"Optimizer.step#{type(optimizer).__name__}.step"
    with torch.no_grad(), torch.autograd.profiler.record_function(profile_name):
        inspect.unwrap(type(optimizer).step)(optimizer)


def _is_dynamo_imported() -> bool:
    return "torch._dynamo" in sys.modules
