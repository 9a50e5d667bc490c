"""Open the input of a rank, and copy its batches to the device one step ahead."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING

from ssdctl.data.store import Split
from ssdctl.device import Decoder, Device, pageable_buffer
from ssdctl.errors import UsageError
from ssdctl.input import augmentations
from ssdctl.input.batch import Batch, LoaderConfig, trim_padding
from ssdctl.input.fake import FakeLoader
from ssdctl.input.loader import Buffer, TrainLoader
from ssdctl.runtime.packages import dali_package

if TYPE_CHECKING:
    from ssdctl.input.dali import DaliLoader


def copy_ahead(batches: Iterable[Batch], device: Device) -> Generator[Batch, None, None]:
    """Copy batches to the device, each while the device works on the previous one."""
    if device.is_host:
        yield from map(trim_padding, batches) if device.execution == "eager" else batches
        return
    waiting: Batch | None = None
    for batch in batches:
        device.wait_for_copies()  # for the waiting batch
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


def check_pipeline(pipeline: str, augment: str) -> None:
    """Raise UsageError if a pipeline is not installed, or an augmentation does not work with it."""
    steps = augmentations.load(augment)
    if pipeline != "dali":
        return
    if any(step.pixels for step in steps):
        raise UsageError(
            f"--augment {augment}: a plugin that changes pixels needs --pipeline native"
        )
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
    check_pipeline(pipeline, config.augment)
    if pipeline == "dali":
        from ssdctl.input.dali import DaliLoader

        return DaliLoader(split, config, decoder)
    return TrainLoader(split, config, buffer)
