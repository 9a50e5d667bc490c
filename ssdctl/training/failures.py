"""Handle bad steps and bad images, and end the run if there are too many.

A bad step has a NaN or infinite loss or gradient, and the device skips it.

A step does not wait for the device (step.py); its flag is read at the log points, where the run
waits anyway. Then the policy decides: continue (`skip`), restore the last checkpoint and continue
after the offending images (`rollback`), or end (`stop`). Many consecutive bad steps end every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssdctl.distributed import collectives
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import DataError, NonFiniteError
from ssdctl.input import BadImage, Batch

MAX_CONSECUTIVE = 20
MAX_ROLLBACKS = 10
MIN_LIMIT = 10
LIMIT_FRACTION = 0.01  # bad images per training image


class BadStep(NamedTuple):
    step: int
    image_ids: list[int]  # on this rank


class NonFiniteGuard:
    def __init__(self, policy: str) -> None:
        self.policy = policy
        self._watched: list[tuple[BadStep, Tensor]] = []
        self._consecutive = 0
        self._rollbacks = 0

    def watch(self, step: int, is_bad: Tensor, image_ids: list[int]) -> None:
        self._watched.append((BadStep(step, image_ids), is_bad))

    def check(self) -> list[BadStep]:
        """Return the steps that were skipped since the last check; waits for the device."""
        if not self._watched:
            return []
        flags = torch.stack([flag for _, flag in self._watched]).tolist()
        for flag in flags:
            self._consecutive = self._consecutive + 1 if flag else 0
        bad = [step for (step, _), flag in zip(self._watched, flags, strict=True) if flag]
        self._watched.clear()
        return bad

    def should_roll_back(self, bad: list[BadStep], where: str) -> bool:
        """Return whether to roll back.

        Raises:
            NonFiniteError: The policy is `stop`, or there were too many bad steps or rollbacks.
        """
        if not bad:
            return False
        self._rollbacks += self.policy == "rollback"
        has_diverged = self._consecutive >= MAX_CONSECUTIVE or self._rollbacks > MAX_ROLLBACKS
        if self.policy == "stop" or has_diverged:
            raise NonFiniteError(
                f"step {bad[0].step}: the loss or a gradient is NaN or infinite "
                f"({len(bad)} such steps up to step {bad[-1].step}); their images are in {where}",
                hint="they changed no weight: lower --lr, lengthen --warmup or set "
                "--clip-grad, and resume from the last checkpoint with --resume-changed",
            )
        return self.policy == "rollback"


class BadImages:
    """Collects the images that could not be decoded, over all ranks at the log points.

    Each rank's loader replaces its own (ssdctl/input/loader.py).
    """

    def __init__(self, num_images: int) -> None:
        self.limit = max(MIN_LIMIT, int(LIMIT_FRACTION * num_images))
        self._new: dict[int, BadImage] = {}
        self._reported: set[int] = set()  # on all ranks

    def watch(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            for bad in batch.bad:
                if bad.image_id not in self._reported:
                    self._new.setdefault(bad.image_id, bad)

    def collect(self, ranks: Ranks) -> list[BadImage]:
        """Return the new bad images of all ranks since the last call, each image once per run."""
        if not collectives.any_rank([bool(self._new)], ranks)[0]:
            return []
        gathered = collectives.gather_to_first(list(self._new.values()), ranks)
        shares = collectives.broadcast(gathered, ranks)
        collected = {bad.image_id: bad for share in shares for bad in share}
        self._new.clear()
        self._reported.update(collected)
        return sorted(collected.values(), key=lambda bad: bad.sample)

    def refuse_too_many(self) -> None:
        """Raise DataError if there are too many to trust the data; all ranks decide alike."""
        if len(self._reported) > self.limit:
            raise DataError(
                f"{len(self._reported)} images could not be decoded, the limit is {self.limit}; "
                "the bad_image events in metrics.jsonl name them",
                hint="fix the dataset; ssdctl prepare --force then checks every image",
            )
