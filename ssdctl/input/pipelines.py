"""Open the input of training: threads, DALI, or random batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ssdctl.data.store import Split
from ssdctl.device.base import Decoder, pageable_buffer
from ssdctl.errors import UsageError
from ssdctl.input.batch import Batch
from ssdctl.input.fake import FakeLoader
from ssdctl.input.loader import Buffer, TrainLoader
from ssdctl.input.sampler import LoaderConfig, SampleStream
from ssdctl.runtime.torch_compat import dali_package


class TrainInput(Protocol):
    """A source of training batches."""

    def batches(self, start_step: int, end_step: int) -> Iterator[Batch]:
        """Yield this rank's micro-batches of steps start to end, `accumulate` for each step."""
        ...


def check_pipeline(pipeline: str) -> None:
    """Check that a pipeline is installed.

    Raises:
        UsageError: DALI is not installed.
    """
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
) -> TrainInput:
    """Return the input of one rank.

    Args:
        pipeline: `native` or `dali`.
        split: The images.
        config: Which part of the stream to load, and how.
        fake: Random batches instead; no image is read.
        decoder: The device on which DALI decodes; None: the host.
        buffer: Allocates the pixels of a batch: `Device.host_buffer`.

    Raises:
        UsageError: DALI is not installed.
    """
    if fake:
        return FakeLoader(split, config)
    check_pipeline(pipeline)
    stream = SampleStream(split.trainable, config.seed)
    if pipeline == "dali":
        from ssdctl.input.dali import DaliLoader

        return DaliLoader(split, stream, config, decoder)
    return TrainLoader(split, stream, config, buffer)
