"""TPUs through torch_xla: a later version's work. Asking for one is refused, never replaced."""

from __future__ import annotations

from ssdctl.device.base import Device
from ssdctl.errors import UsageError


def open_xla(local_rank: int) -> Device:
    """Refuse.

    Raises:
        UsageError: Always, in this version.
    """
    raise UsageError(
        "device xla: this version of ssdctl does not train on TPUs yet",
        hint="--device cpu or --device cuda",
    )
