"""The batches of each step, on the device; with several ranks, a step ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ssdctl.errors import DataError, DiskError
from ssdctl.input.batch import Batch, LoaderConfig
from ssdctl.input.open import copy_ahead, open_input

if TYPE_CHECKING:
    from ssdctl.training.setup import OpenedRun


class StepInput:
    """The input of a run on this rank.

    A rank whose input fails must not leave the others waiting in the next step, so they all have
    to know before it. They exchange flags once a step and read them a step later; with several
    ranks the batches are therefore fetched a step ahead.
    """

    def __init__(self, opened: OpenedRun) -> None:
        self._opened = opened
        self._is_ahead = not opened.ranks.is_single_process
        self._batches: Iterator[Batch] = iter(())
        self._next: list[Batch] = []
        self._error: DataError | DiskError | None = None

    def start(self, samples_seen: int, steps: int) -> None:
        opened, config, plan = self._opened, self._opened.plan.config.train, self._opened.plan
        loaded = LoaderConfig.of(
            config,
            opened.train,
            batch_size=plan.batch_size,
            threads=opened.threads,
            accumulate=config.accumulate,
            augment=config.augment if config.overfit is None else "none",
            first_sample=samples_seen,
            rank=opened.ranks.rank,
            world_size=opened.ranks.world_size,
        )
        source = open_input(
            config.pipeline,
            opened.train,
            loaded,
            fake=config.fake_data,
            decoder=opened.device.decoder,
            buffer=opened.device.host_buffer,
        )
        self._batches = copy_ahead(source.batches(0, steps), opened.device)
        self._next = self._fetched() if self._is_ahead else []

    def next(self) -> list[Batch]:
        """Return the next step's micro-batches; none if the input failed before them."""
        if not self._is_ahead:
            return self._fetched()
        batches, self._next = self._next, self._fetched()
        return batches

    @property
    def has_failed(self) -> bool:
        """Whether a later step, the next but one at the latest, lacks its images."""
        return self._error is not None

    def check(self) -> None:
        """Raise the DataError or DiskError of the input, if it failed."""
        if self._error is not None:
            raise self._error

    def _fetched(self) -> list[Batch]:
        accumulate = self._opened.plan.config.train.accumulate
        try:
            batches = list(itertools.islice(self._batches, accumulate))
        except (DataError, DiskError) as error:
            self._error = error
            return []
        if self._is_ahead and self._opened.device.is_host:
            # The loader reuses the pixels' memory for the step after.
            return [batch._replace(images=batch.images.clone()) for batch in batches]
        return batches
