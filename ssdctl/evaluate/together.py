"""Several ranks detect, each its share of the images; the first one has it all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from ssdctl.errors import SsdctlError
from ssdctl.evaluate.coco_ap import Detections
from ssdctl.evaluate.detect import merge


class Together(NamedTuple):
    """The ranks that evaluate together; as it stands, this process alone."""

    rank: int = 0
    world_size: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]  # on the first rank; [] elsewhere
    broadcast: Callable[[Any], Any] = lambda value: value
    barrier: Callable[[], None] = lambda: None

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def share_of_cores(world_size: int) -> int:
    """How many of the cores that this process may run on are its own among its node's ranks."""
    cores = len(os.sched_getaffinity(0))
    if world_size > 1:
        cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # What a task of Slurm was given, which not every site binds it to.
        cores = min(cores, int(os.environ.get("SLURM_CPUS_PER_TASK", cores)))
    return max(cores, 1)


def all_parts(detect: Callable[[], Detections], together: Together) -> Detections | None:
    """What all ranks found, on the first one.

    Raises:
        SsdctlError: What any rank failed of, on all of them, lest the others wait for it.
    """
    part: Detections | SsdctlError
    try:
        part = detect()
    except SsdctlError as error:
        part = error
    parts = together.gather(part)
    failure = together.broadcast(next((p for p in parts if isinstance(p, SsdctlError)), None))
    if failure is not None:
        raise failure
    return merge(parts) if together.is_main else None
