"""The batches of each step, on the device; with several ranks, a step ahead."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ssdctl.data.store import Split
from ssdctl.device import Decoder, Device, pageable_buffer
from ssdctl.errors import DataError, DiskError, UsageError
from ssdctl.input import Batch, LoaderConfig, trim_padding
from ssdctl.input.fake import FakeLoader
from ssdctl.input.loader import Buffer, TrainLoader
from ssdctl.runtime.packages import dali_package

if TYPE_CHECKING:
    from ssdctl.input.dali import DaliLoader
    from ssdctl.training.run import OpenedRun


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
        opened, config, plan = self._opened, self._opened.run.config.train, self._opened.run.plan
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
        accumulate = self._opened.run.config.train.accumulate
        try:
            batches = list(itertools.islice(self._batches, accumulate))
        except (DataError, DiskError) as error:
            self._error = error
            return []
        if self._is_ahead and self._opened.device.is_host:
            # The loader reuses the pixels' memory for the step after.
            return [batch._replace(images=batch.images.clone()) for batch in batches]
        return batches


def copy_ahead(batches: Iterable[Batch], device: Device) -> Iterator[Batch]:
    """Copy batches to the device, each while the device works on the previous one."""
    if device.is_host:
        yield from map(trim_padding, batches) if device.execution == "eager" else batches
        return
    waiting: Batch | None = None
    for batch in batches:
        device.wait_for_copies()  # the waiting batch's, not the next one's
        is_on_device = batch.images.device.type != "cpu"  # decoded there
        copied = batch._replace(
            images=batch.images if is_on_device else device.copy(batch.images),
            boxes=device.copy(batch.boxes),
            labels=device.copy(batch.labels),
            jitter=None if batch.jitter is None else device.copy(batch.jitter),
        )
        if waiting is not None:
            yield waiting
        waiting = copied
        device.wait_for_reads()  # the next batch may be decoded into the same memory
    if waiting is not None:
        device.wait_for_copies()
        yield waiting


def check_pipeline(pipeline: str) -> None:
    """Raise UsageError if a pipeline is not installed."""
    if pipeline != "dali":
        return
    try:
        import nvidia.dali  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"--pipeline dali: nvidia-dali cannot be imported ({error})",
            hint=f"pip install {dali_package()}, or leave --pipeline at native",
        ) from None


def open_input(
    pipeline: str,
    split: Split,
    config: LoaderConfig,
    *,
    fake: bool = False,
    decoder: Decoder | None = None,
    buffer: Buffer = pageable_buffer,
) -> TrainLoader | FakeLoader | DaliLoader:
    """Return the input of one rank.

    Args:
        pipeline: `native` or `dali`.
        fake: Random batches instead; no image is read.
        decoder: The device on which DALI decodes; None: the host.
        buffer: Allocates the pixels of a batch: `Device.host_buffer`.
    """
    if fake:
        return FakeLoader(split, config)
    check_pipeline(pipeline)
    if pipeline == "dali":
        from ssdctl.input.dali import DaliLoader

        return DaliLoader(split, config, decoder)
    return TrainLoader(split, config, buffer)
