"""What a run consists of before its first step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ssdctl.data.store import Split
from ssdctl.device.base import Device
from ssdctl.distributed.ranks import Ranks
from ssdctl.model.ssd300 import SSD300, Architecture
from ssdctl.training.run import SettledRun


class Setup(NamedTuple):
    """The parts of a run before its first step."""

    run: SettledRun
    device: Device
    ranks: Ranks
    train: Split
    val: Split | None
    val_rows: NDArray[np.int64] | None  # the images of `val` to score; None: all
    architecture: Architecture
    model: SSD300
    threads: int
    memory_hints: Callable[[], contextlib.AbstractContextManager[None]]  # explains a full memory
