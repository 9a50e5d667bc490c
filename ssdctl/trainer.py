"""A training run of the Python API that can be stepped."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from ssdctl.config.call import ConfigLike, PathLike, overrides_of, resolve_call
from ssdctl.data.store_folder import with_absolute_data
from ssdctl.distributed import collectives
from ssdctl.errors import UsageError, hints_in_messages
from ssdctl.model.ssd300 import SSD300
from ssdctl.runs.display import RunDisplay
from ssdctl.runs.run import Run
from ssdctl.runtime import signals
from ssdctl.runtime.progress import can_redraw, progress_bar, without_progress
from ssdctl.training import setup

if TYPE_CHECKING:
    from ssdctl.config.fields import DeviceName, Precision


log = logging.getLogger(__name__)


def _log_facts(facts: Sequence[tuple[str, str]]) -> None:
    for name, text in facts:
        log.info("%s: %s", name, text)


def _log_line(text: str, _style: str) -> None:
    log.info("%s", text)


class Trainer:
    """A run that can be stepped: `for step in trainer: ...` trains and yields each step's number.

        trainer = ssdctl.Trainer("photos", epochs=20)
        for step in trainer:
            if step == 100:
                print(trainer.model)
        trainer.path

    Like `ssdctl.train`, it logs, evaluates, saves and resumes. A loop may be left and entered
    again. The end of the run closes it; so does `close`, or a `with` block.

    Args:
        data: The dataset folder or file.
        config: A config, or a config file, with other settings.
        progress: Show a progress bar, on a terminal and in a notebook.
        out, init, ...: The settings are those of `ssdctl.train`.

    Attributes:
        path: The run folder.
        model: The network that is trained, on its device.
        optimizer: Its optimizer.
        total_steps: Optimizer steps of the whole run.

    Raises:
        ssdctl.errors.SsdctlError: See `ssdctl.train`.
    """

    @hints_in_messages()
    def __init__(
        self,
        data: PathLike | None = None,
        *,
        out: PathLike | None = None,
        init: PathLike | None = None,
        preset: str | None = None,
        backbone: str | None = None,
        backbone_weights: PathLike | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        batch_size: int | Literal["auto"] | None = None,
        lr: float | None = None,
        warmup: str | float | None = None,
        optimizer: Literal["sgd", "adamw"] | None = None,
        precision: Precision | None = None,
        device: DeviceName | None = None,
        workers: int | None = None,
        seed: int | None = None,
        config: ConfigLike | None = None,
        progress: bool = True,
    ) -> None:
        given = {
            "data": data,
            "out": out,
            "init": init,
            "preset": preset,
            "backbone": backbone,
            "backbone_weights": backbone_weights,
            "epochs": epochs,
            "steps": steps,
            "batch_size": batch_size,
            "lr": lr,
            "warmup": warmup,
            "optimizer": optimizer,
            "precision": precision,
            "device": device,
            "workers": workers,
            "seed": seed,
        }
        config = resolve_call(config, overrides_of("train", given))
        with contextlib.ExitStack() as stack, signals.handled():
            is_live = progress and can_redraw()
            display = RunDisplay(_log_facts, _log_line, is_live=is_live, has_steps=True)
            stack.callback(display.close)
            self._trainer = stack.enter_context(
                setup.open_trainer(
                    with_absolute_data(config),
                    emit=display.show,
                    progress=progress_bar if progress else without_progress,
                )
            )
            self._resources = stack.pop_all()
        self._is_open = True
        self.path = Path(self._trainer.opened.plan.out)
        self.model: SSD300 = self._trainer.model
        self.optimizer: torch.optim.Optimizer = self._trainer.optimizer
        self.total_steps: int = self._trainer.plan.total_steps

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._trainer.step

    def __iter__(self) -> Iterator[int]:
        """Train and yield the number of each step after it.

        Raises:
            ssdctl.errors.Stopped: Interrupted; everything is saved, and the trainer is closed.
            ssdctl.errors.NonFiniteError: Too many steps had a NaN or infinite loss or gradient.
            ssdctl.errors.UsageError: The trainer is closed.
        """
        with hints_in_messages():
            self._require_open()
            try:
                with signals.handled():
                    for step in self._trainer:
                        yield step
                        self._require_open()
                # The others may evaluate the checkpoint that the first rank writes.
                collectives.barrier(self._trainer.opened.ranks)
            except GeneratorExit:  # the loop was left
                raise
            except BaseException:
                self.close()
                raise
            self.close()

    def run(self) -> Run:
        """Train to the end of the run."""
        for _ in self:
            pass
        return Run(self.path)

    @hints_in_messages()
    def save(self) -> None:
        """Save a checkpoint of this step. Under torchrun every rank calls it.

        Raises:
            ssdctl.errors.DiskError: It cannot be written.
            ssdctl.errors.UsageError: The trainer is closed.
        """
        self._require_open()
        self._trainer.save(is_scheduled=False)
        self._trainer.saver.wait()
        collectives.barrier(self._trainer.opened.ranks)

    def _require_open(self) -> None:
        if not self._is_open:
            raise UsageError(
                f"{self.path}: this trainer is closed",
                hint="a new Trainer with the same settings continues the run",
            )

    def close(self) -> None:
        """Release the run folder and the process group; what was not saved is lost."""
        self._is_open = False
        self._resources.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Trainer({self.path}: step {self.step} of {self.total_steps})"
