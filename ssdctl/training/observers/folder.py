"""Write the files of a run folder other than checkpoints: metrics.jsonl, config.toml and more."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from ssdctl.config.render import snapshot_sources, to_snapshot_toml
from ssdctl.files import write_text
from ssdctl.runs.evaluation import write_evaluation
from ssdctl.runs.folder import RunDir, evaluation_of, find_environment, write_environment
from ssdctl.runs.metrics import Record, open_run
from ssdctl.training.observers import End, Epoch, Observer, Rewind, Scored, Start, Step

if TYPE_CHECKING:
    from ssdctl.training.plan import Plan
    from ssdctl.training.step import BadStep

log = logging.getLogger(__name__)


class FolderWriter(Observer):
    """Creates the run folder and writes to it. A rewind drops the records after its step.

    The records of metrics.jsonl are of the kinds `train`, `epoch`, `eval` and `event`.
    """

    def __init__(self, plan: Plan, start_step: int) -> None:
        self._plan = plan
        self._folder = RunDir(plan.out)
        self._metrics = open_run(self._folder, start_step)
        self._is_described = False  # config.toml is of this start
        self._unwritten: Record = {}  # the first record of a resumed run, which may have ended

    @property
    def past(self) -> Sequence[Record]:
        """The records up to the start step, or to the step of the last rewind."""
        return self._metrics.past_records

    def on_start(self, start: Start) -> None:
        self._device, self._world_size = start.device, start.world_size
        if not self._folder.config.exists():
            self._describe()
        images = _images_of(start)
        self._warn_of_other_images(images)
        facts = {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "train_images": self._plan.images,
            "val_images": start.val_images,
            "total_steps": self._plan.total_steps,
            "global_batch_size": self._plan.global_batch_size,
            "world_size": start.world_size,
            **images,
            "sample": start.train.training_sample(),
        }
        record = self._record("event", start.step, event="started", **facts)
        self._unwritten = record
        if start.step == 0 or not self.past:
            self._begin()

    def _warn_of_other_images(self, images: Record) -> None:
        before = next((r for r in reversed(self.past) if r.get("event") == "started"), {})
        differences = [
            f"{name} was {before[name]}, is {value}"
            for name, value in images.items()
            if before.get(name, value) != value
        ]
        if differences:
            text = "the dataset was prepared again since the last start: %s"
            if any(difference.startswith("val_") for difference in differences):
                text += "; AP before and after are of other images or labels"
            log.warning(text, "; ".join(differences))

    def _describe(self) -> None:
        config = self._plan.config
        write_text(self._folder.config, to_snapshot_toml(config))
        facts = find_environment(self._device, self._world_size, snapshot_sources(config))
        write_environment(self._folder.environment, facts)
        self._is_described = True

    def on_step(self, step: Step) -> None:
        self._begin()
        if not self._is_described:  # a start that trains nothing leaves config.toml as it is
            self._describe()
        if step.metrics is not None:
            self._write("train", step.step, **step.metrics._asdict())
            if step.is_input_bound:
                self._event("input_starves", step.step, data_wait=step.metrics.data_wait)
                log.warning(
                    "the device waits for images %.0f%% of the time: use more --workers, or "
                    "smaller images (ssdctl prepare --shrink 512)",
                    100 * step.metrics.data_wait,
                )
        for image in step.bad_images:
            self._event("bad_image", step.step, **image._asdict())
            log.warning("image %s was replaced: %s: %s", image.image_id, image.file, image.problem)
        for bad in step.skipped:
            self._event("nonfinite", step.step, bad_step=bad.step)
            self._write_skipped(bad)
        if step.skipped:
            log.warning(
                "%d steps up to step %d had a NaN or infinite loss or gradient and were skipped; "
                "their images are in %s",
                len(step.skipped),
                step.skipped[-1].step,
                self._folder.nonfinite,
            )

    on_report = on_step

    def _write_skipped(self, bad: BadStep) -> None:
        content = json.dumps({"step": bad.step, "image_ids": bad.image_ids})
        name, copy = f"step-{bad.step:08d}", 1
        path = self._folder.nonfinite / f"{name}.json"
        while path.exists() and path.read_text() != content:  # written before a rollback
            copy += 1
            path = path.with_name(f"{name}-{copy}.json")
        write_text(path, content)

    def on_epoch(self, epoch: Epoch) -> None:
        rate = epoch.images_per_second
        self._write("epoch", epoch.step, duration_s=epoch.duration_s, images_per_second=rate)

    def on_evaluation(self, scored: Scored) -> None:
        step, evaluation = scored.step, scored.evaluation
        if scored.is_best:
            write_evaluation(evaluation_of(self._folder.step_checkpoint(step)), evaluation)
        # The record comes last: an evaluation without one is repeated at the next start.
        self._write("eval", step, **evaluation.metrics, **scored.losses)
        ap = {c.name: c.AP for c in evaluation.per_class}
        self._event("class_ap", step, AP=ap)

    def on_rewind(self, rewind: Rewind) -> None:
        self._metrics.rewind(rewind.step)
        self._event("rolled_back", rewind.step, from_step=rewind.from_step)

    def on_end(self, end: End) -> None:
        if end.outcome == "stopped":
            total_s = round(end.summary.total_s, 1)
            self._event("stopped", end.step, signal=end.signal, total_s=total_s)
        elif end.outcome == "finished" and end.has_progressed:
            facts = end.summary._asdict()
            del facts["out"], facts["step"]
            self._event("finished", end.step, **facts)

    def _event(self, name: str, step: int, **facts: Any) -> None:
        self._write("event", step, event=name, **facts)

    def _write(self, kind: str, step: int, **values: Any) -> None:
        self._begin()
        self._metrics.write(self._record(kind, step, **values))

    def _begin(self) -> None:
        """Write the first record of this start, once it does something."""
        record, self._unwritten = self._unwritten, {}
        if record:
            self._metrics.write(record)

    def _record(self, kind: str, step: int, **values: Any) -> Record:
        epoch = round(self._plan.epoch(step), 4)
        return {"kind": kind, "step": step, "epoch": epoch, **values}


def _images_of(start: Start) -> Record:
    """Return what `prepare` decides about the images of a run."""
    train, val = start.train, start.val
    of_val = {} if val is None or val is train else {"val_labels": val.labels_digest()}
    return of_val | {
        "encoding": "raw" if train.is_raw else "jpeg",
        "shrink": train.shrink or "off",
        "image_ids": train.training_digest(),
        "labels": train.labels_digest(),
        "division": train.divisions[0] if train.divisions else None,
    }
