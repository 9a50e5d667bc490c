"""Write a checkpoint file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ssdctl.files import atomic_write


def write_checkpoint(path: Path, payload: dict[str, Any]) -> None:
    """Write a checkpoint atomically.

    Raises:
        DiskError: It cannot be written; an earlier file at `path` is unchanged.
    """
    with atomic_write(path) as file:
        try:
            torch.save(payload, file)
        except RuntimeError as error:  # PyTorch's writer hides the OSError behind its own error
            raise _disk_error(error) from error


def _disk_error(error: RuntimeError) -> Exception:
    """Return the OSError that caused an error, or the error itself."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error
