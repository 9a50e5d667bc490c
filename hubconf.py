"""For torch.hub: `torch.hub.load("DIR", "ssd300", source="local", checkpoint="best.pt")`."""

from __future__ import annotations

from typing import Any

from ssdctl import SSD300

dependencies = ["torch", "numpy", "PIL", "msgspec", "pyarrow"]


def ssd300(checkpoint: str | None = None, **options: Any) -> SSD300:
    """Return SSD300 with the weights of a checkpoint, or with random weights.

    Args:
        checkpoint: What `ssdctl.SSD300.from_checkpoint` takes: a file, a run folder or a name.
        options: Arguments of `ssdctl.SSD300` without a checkpoint: `backbone`, `num_classes`, ...

    Raises:
        ValueError: Both are given: the checkpoint knows its network.
    """
    if checkpoint is None:
        return SSD300(**{"backbone": "resnet34", "num_classes": 81, **options})
    if options:
        raise ValueError(f"a checkpoint knows its network: leave out {', '.join(options)}")
    return SSD300.from_checkpoint(checkpoint)
