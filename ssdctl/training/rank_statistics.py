"""Batch norm's statistics, which differ between the ranks of a run until they are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from ssdctl.distributed import collectives
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import IntegrityError
from ssdctl.training.ema import EMA


class RankStatistics:
    """The statistics of this rank's network, and their moving averages."""

    def __init__(self, model: nn.Module, ema: EMA | None, ranks: Ranks) -> None:
        self._ranks = ranks
        buffers = [*model.buffers(), *(() if ema is None else ema.buffers())]
        self._own = [buffer for buffer in buffers if buffer.is_floating_point()]
        self._averaged_step: int | None = None

    def average(self, step: int) -> None:
        """Average them over the ranks, once after a step."""
        if self._averaged_step != step:
            collectives.average_buffers(self._own, self._ranks)
            self._averaged_step = step

    @contextlib.contextmanager
    def averaged(self, step: int) -> Iterator[list[list[Tensor]] | None]:
        """Average them for the block only; yield those of each rank, on the first rank."""
        if self._ranks.is_single_process:
            yield None
            return
        own = [buffer.detach().to("cpu", copy=True) for buffer in self._own]
        of_ranks = collectives.gather_to_first(own, self._ranks)
        self.average(step)
        yield of_ranks
        self._load(own)

    def load(self, of_ranks: Sequence[Sequence[Tensor]] | None) -> None:
        """Load this rank's, if as many ranks saved theirs; else the average remains.

        Raises:
            IntegrityError: They are not of this network.
        """
        self._averaged_step = None
        if of_ranks is None or len(of_ranks) != self._ranks.world_size:
            return
        own = of_ranks[self._ranks.rank]
        if [b.shape for b in self._own] != [b.shape for b in own]:
            raise IntegrityError("the checkpoint has statistics of batch norm of another network")
        self._load(own)

    def _load(self, own: Sequence[Tensor]) -> None:
        self._averaged_step = None
        for buffer, value in zip(self._own, own, strict=True):
            buffer.copy_(value)
