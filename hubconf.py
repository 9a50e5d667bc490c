"""For torch.hub: `torch.hub.load("DIR", "ssd300", source="local", checkpoint="best.pt")`."""

from __future__ import annotations

from typing import Any

from ssdctl import SSD300

dependencies = ["torch", "numpy", "PIL", "msgspec", "pyarrow"]


def ssd300(checkpoint: str | None = None, **options: Any) -> SSD300:
    """Return SSD300 with the weights of a checkpoint, or with random weights.

    Args:
        checkpoint: What `ssdctl.SSD300.from_checkpoint` takes: a file, a run folder or a name.
        options: Of `ssdctl.SSD300` if no checkpoint is given: `backbone`, `num_classes`, ...
    """
    if checkpoint is None:
        return SSD300(**{"backbone": "resnet34", "num_classes": 81, **options})
    return SSD300.from_checkpoint(checkpoint)
