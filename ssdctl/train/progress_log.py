"""What is told at the log points of a run: figures, images and steps that were left out."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ssdctl.distributed import collectives
from ssdctl.files import write_text
from ssdctl.input.loader import Batch
from ssdctl.runs.writer import RunWriter
from ssdctl.train.bad_images import BadImages
from ssdctl.train.nonfinite import BadStep
from ssdctl.train.setup import Say, Setup
from ssdctl.train.throughput import ThroughputMeter


class ProgressLog:
    """Puts together what happened since the last log point, and tells it.

    Args:
        setup: The run.
        recorder: Where it is written down.
        pace: How fast the run goes.
        warn: Tells the user.
    """

    def __init__(self, setup: Setup, recorder: RunWriter, pace: ThroughputMeter, warn: Say) -> None:
        self._setup = setup
        self._recorder = recorder
        self._pace = pace
        self._warn = warn
        self._bad_images = BadImages(setup.plan.images)

    def watch(self, batches: Sequence[Batch]) -> None:
        """Note the images of a step's batches that were replaced."""
        self._bad_images.watch(batches)

    def step(self, step: int, figures: dict[str, float], lr: float) -> None:
        """The figures of a step, and a warning where the device waits for its images."""
        lap = self._pace.lap()
        record = {
            "loss": figures["loss"],
            "loss_box": figures["loss_box"],
            "loss_class": figures["loss_class"],
            "lr": lr,
            "images_per_second": round(lap.images_per_second, 3),
            "grad_norm": figures["grad_norm"],
            "data_wait": round(lap.data_wait, 4),
            "memory_bytes": self._setup.device.peak_memory_bytes(),
        }
        self._recorder.train(step, record)
        if self._pace.is_input_bound():
            self._recorder.event("input_starves", step, data_wait=round(lap.data_wait, 4))
            self._warn(
                f"the device waits for images {lap.data_wait:.0%} of the time: give it more "
                "--workers, or smaller images (ssdctl prepare --shrink 512)"
            )

    def bad_images(self, step: int) -> None:
        """Images that were replaced since the last time.

        Raises:
            DataError: There are too many of them.
        """
        for bad in self._bad_images.collect(self._setup.ranks):
            self._recorder.event("bad_image", step, **bad._asdict())
            self._warn(f"image {bad.image_id} was replaced: {bad.file}: {bad.problem}")
        self._bad_images.refuse_too_many()

    def bad_steps(self, step: int, bad: list[BadStep]) -> None:
        """Steps that were left out; their images are named in RUN/nonfinite/."""
        folder = self._setup.out / "nonfinite"
        shares = collectives.gather_to_first([entry.image_ids for entry in bad], self._setup.ranks)
        for number, entry in enumerate(bad):
            ids = [i for share in shares for i in share[number]]
            self._recorder.event("nonfinite", step, bad_step=entry.step)
            if self._setup.ranks.is_main:
                content = json.dumps({"step": entry.step, "image_ids": ids})
                write_text(folder / f"step-{entry.step:08d}.json", content)
        self._warn(
            f"{len(bad)} steps up to step {bad[-1].step} had a NaN or infinite loss or "
            f"gradient and were left out; their images are in {folder}"
        )
