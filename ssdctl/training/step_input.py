"""The batches of each step, on the device, and the images that were replaced in them."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING

from ssdctl.distributed import collectives
from ssdctl.errors import DataError, DiskError
from ssdctl.input.batch import BadImage, Batch, LoaderConfig
from ssdctl.input.open import copy_ahead, open_input
from ssdctl.runtime.safe_text import counted

if TYPE_CHECKING:
    from ssdctl.data.store import Split
    from ssdctl.device import Device
    from ssdctl.distributed import Ranks
    from ssdctl.runs.metrics import Record
    from ssdctl.training.plan import Plan

MIN_LIMIT = 10  # images that cannot be decoded, and as a fraction of the training images
LIMIT_FRACTION = 0.01


class StepInput:
    """The input of a run on this rank.

    A rank whose input fails must not leave the others waiting in the next step, so they all have
    to know before it. They exchange flags once a step and read them a step later; with several
    ranks the batches are therefore fetched a step ahead.
    """

    def __init__(
        self, plan: Plan, split: Split, device: Device, ranks: Ranks, threads: int
    ) -> None:
        self._plan, self._split, self._device, self._ranks = plan, split, device, ranks
        self._threads = threads
        self._is_ahead = not ranks.is_single_process
        self._batches: Generator[Batch, None, None] | None = None
        self._next: list[Batch] = []
        self._error: DataError | DiskError | None = None

    def start(self, samples_seen: int, steps: int) -> None:
        config, device, ranks = self._plan.config.train, self._device, self._ranks
        self.close()
        loaded = LoaderConfig.of(
            config,
            self._split,
            batch_size=self._plan.batch_size,
            threads=self._threads,
            accumulate=config.accumulate,
            augment=config.augment if config.overfit is None else "none",
            first_sample=samples_seen,
            rank=ranks.rank,
            world_size=ranks.world_size,
        )
        source = open_input(
            config.pipeline,
            self._split,
            loaded,
            fake=config.fake_data,
            decoder=device.decoder,
            buffer=device.host_buffer,
        )
        self._batches = copy_ahead(source.batches(0, steps), device)
        self._next = self._fetched() if self._is_ahead else []

    def close(self) -> None:
        """End the threads that decode images."""
        if self._batches is not None:
            self._batches.close()
        self._batches, self._next, self._error = None, [], None

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
        accumulate = self._plan.config.train.accumulate
        try:
            batches = list(itertools.islice(self._batches or (), accumulate))
        except (DataError, DiskError) as error:
            self._error = error
            return []
        if self._is_ahead and self._device.is_host:
            # The loader reuses the pixels' memory for the step after.
            return [batch._replace(images=batch.images.clone()) for batch in batches]
        return batches


class BadImages:
    """The images of a run that could not be decoded, on all ranks; each is reported once.

    Each rank's loader replaces its own (ssdctl/input/loader.py).

    Args:
        images: Training images, of which a fraction may be bad.
    """

    def __init__(self, images: int, ranks: Ranks) -> None:
        self._ranks = ranks
        self._limit = max(MIN_LIMIT, int(LIMIT_FRACTION * images))
        self._new: dict[int, BadImage] = {}  # on this rank, by image id
        self._reported: set[int] = set()  # of all ranks

    def start(self, past: Iterable[Record]) -> None:
        """Count the images that earlier starts recorded, too; `past` is read on the first rank."""
        ids = {r.get("image_id", 0) for r in past if r.get("event") == "bad_image"}
        self._reported = collectives.broadcast(ids, self._ranks)

    def add(self, batches: Sequence[Batch]) -> None:
        for bad in (bad for batch in batches for bad in batch.bad):
            if bad.image_id not in self._reported:
                self._new.setdefault(bad.image_id, bad)

    def report(self) -> list[BadImage]:
        """Return the images of all ranks that were added since the last call."""
        if not collectives.any_rank([bool(self._new)], self._ranks)[0]:
            return []
        gathered = collectives.gather_to_first(list(self._new.values()), self._ranks)
        shares = collectives.broadcast(gathered, self._ranks)
        bad_images = {bad.image_id: bad for share in shares for bad in share}
        self._new.clear()
        self._reported.update(bad_images)
        return sorted(bad_images.values(), key=lambda bad: bad.sample)

    def check(self) -> None:
        """Raise DataError if there are too many to trust the data; all ranks decide alike."""
        if (count := len(self._reported)) > self._limit:
            raise DataError(
                f"{counted(count, 'image')} could not be decoded, the limit is {self._limit}; "
                "the bad_image events in metrics.jsonl name them",
                hint="fix the dataset; ssdctl prepare --data DIR --force then checks every image",
            )
