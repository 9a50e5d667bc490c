"""The training loop: linear, from the first step to the last, on one screen.

    summary = run_training(resolved, say=print, warn=print, emit=show, progress=tqdm_like)

`emit` gets every record of metrics.jsonl as it is written; `say` and `warn` get
what a user should read.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ssdctl.config.render import to_toml, values
from ssdctl.config.resolve import Resolved
from ssdctl.device import open_device
from ssdctl.errors import Stopped
from ssdctl.files import make_dir, remove_stale_temporaries, write_text
from ssdctl.input.loader import Batch
from ssdctl.input.pipelines import open_input
from ssdctl.input.samples import TrainPlan
from ssdctl.model.weights import load_state
from ssdctl.train import distributed, signals
from ssdctl.train.bad_images import BadImages
from ssdctl.train.checkpoint import CheckpointFolder
from ssdctl.train.guard import BadStep, Guard
from ssdctl.train.metrics import MetricsFile, Record, environment
from ssdctl.train.optimizer import build_optimizer
from ssdctl.train.ranks import find_ranks
from ssdctl.train.resume import begin
from ssdctl.train.schedule import Every, every
from ssdctl.train.setup import Progress, Say, Setup, prepare_run
from ssdctl.train.step import TrainStep
from ssdctl.train.validate import validate


class Summary(NamedTuple):
    """How a run ended."""

    out: str
    step: int
    images_per_second: float
    best_ap: float | None
    peak_memory_bytes: int
    total_s: float


def run_training(
    resolved: Resolved,
    *,
    say: Say,
    warn: Say,
    emit: Callable[[Record], None],
    progress: Progress,
) -> Summary:
    """Train to the end of the plan, or to the target AP, going on where an earlier run stopped.

    Raises:
        Stopped: A signal came; everything is saved.
        NonFiniteError: Too many steps went bad.
        DistributedError: Another rank was lost.
    """
    ranks = find_ranks()
    device = open_device(resolved.config.train.device, ranks.local_rank)
    quiet = not ranks.is_first
    with distributed.group(ranks, device):
        say, warn, emit = (_muted(speak, quiet) for speak in (say, warn, emit))
        setup = prepare_run(resolved.config, device, ranks, say, progress if not quiet else _plain)
        return _Run(setup, resolved, say, warn, emit).train()


class _Run:
    """The state of a run between its steps."""

    def __init__(
        self,
        setup: Setup,
        resolved: Resolved,
        say: Say,
        warn: Say,
        emit: Callable[[Record], None],
    ) -> None:
        config = setup.config.train
        self.setup, self.say, self.warn, self._emit = setup, say, warn, emit
        self.plan = setup.plan
        self.optimizer = build_optimizer(setup.model, config)
        self.checkpoints = CheckpointFolder(setup.out, config.keep)
        self.save_every = every(config.save_every, self.plan)
        self.eval_every = every(config.eval_every, self.plan) if config.eval_every else None

        start = begin(setup, self.checkpoints, self.optimizer, say, warn)
        self.step, self.best_ap, self.first_sample = start.step, start.best_ap, start.samples_seen
        self.first_step = start.step
        self.batches: Iterator[Batch] = iter(())
        self.saved_step = start.step if start.is_saved else None
        self.saved_at = self.started_at = time.monotonic()
        self.paused_s = 0.0  # evaluations and saves, which are no training
        self.trained_images = 0
        self.bad_images = BadImages(self.plan.images)
        evaluated = self._open_folder(resolved) if setup.ranks.is_first else None
        self.evaluated_step = distributed.broadcast(evaluated, setup.ranks)

    def _open_folder(self, resolved: Resolved) -> int | None:
        """Write what describes the run; return the last step that was evaluated already."""
        out = make_dir(self.setup.out)
        make_dir(out / "logs")
        remove_stale_temporaries(out)
        self.checkpoints.clean()
        for path in self.checkpoints.retire(self.step):
            self.warn(f"{path.name}: set aside, the run goes on from step {self.step}")
        resolved = resolved.with_value("train.precision", self.setup.precision)
        write_text(out / "config.toml", to_toml(resolved))
        facts = environment(self.setup.device.label, self.setup.ranks.world_size)
        write_text(out / "environment.json", json.dumps(facts, indent=2) + "\n")
        self.metrics = MetricsFile(out / "metrics.jsonl", self.step)
        return self.metrics.last_evaluation

    def train(self) -> Summary:
        setup, config, plan = self.setup, self.setup.config.train, self.plan
        network = distributed.wrap(setup.model, setup.ranks, setup.device)
        take_step = TrainStep(network, self.optimizer, setup.device, config, setup.precision)
        guard = Guard(config.on_nonfinite)
        self._start_input()
        setup.model.train()

        logged_step, logged_at = self.step, time.monotonic()
        self._stop_if_asked()
        if self.step > 0 and self.eval_every is not None and self._is_due(self.eval_every, None):
            self._evaluate()  # where the run was stopped before it came to that
        while self.step < plan.total_steps and not self._reached_target():
            lr = plan.lr(self.step)
            batches = list(itertools.islice(self.batches, config.accumulate))
            self.bad_images.watch(batches)
            result = take_step(batches, lr)
            self.step += 1
            self.trained_images += plan.global_batch_size
            guard.watch(self.step, result.is_bad, self._image_ids(batches))

            if self.step % config.log_every == 0 or self.step == plan.total_steps:
                figures = result.read(setup.ranks)
                now = time.monotonic()
                rate = plan.global_batch_size * (self.step - logged_step) / (now - logged_at)
                self._log_step(figures, lr, rate)
                self._report_bad_images()
                if bad := guard.check():
                    self._report_bad_steps(bad)
                    if guard.judge(bad, str(self.setup.out / "nonfinite")):
                        self._roll_back()
                        now = time.monotonic()
                logged_step, logged_at = self.step, now

            paused_at = time.monotonic()
            self._stop_if_asked()
            if self.eval_every is not None and self._is_due(self.eval_every, None):
                self._evaluate()
            if self._is_due(self.save_every, self.saved_at):
                self._save()
            logged_at += time.monotonic() - paused_at
            self.paused_s += time.monotonic() - paused_at
        return self._finish()

    def _start_input(self) -> None:
        """Read on from the next sample of the stream."""
        setup, config = self.setup, self.setup.config.train
        plan = TrainPlan(
            seed=config.seed,
            first_sample=self._next_sample(),
            batch_size=config.batch_size,
            rank=setup.ranks.rank,
            world_size=setup.ranks.world_size,
            accumulate=config.accumulate,
            augment=config.augment == "ssd",
            hue_degrees=config.hue_degrees,
            threads=setup.threads,
            max_boxes=max(setup.train.most_boxes, 1),
        )
        source = open_input(config.pipeline, setup.train, plan, fake=config.fake_data)
        self.batches = source.batches(0, self.plan.total_steps - self.step)

    def _next_sample(self) -> int:
        """The stream's first sample that no step has taken yet."""
        return self.first_sample + (self.step - self.first_step) * self.plan.global_batch_size

    def _image_ids(self, batches: Sequence[Batch]) -> list[int]:
        return [int(i) for batch in batches for i in self.setup.train.image_ids[batch.rows]]

    def _report_bad_images(self) -> None:
        """Tell of images that were replaced since the last time; end the run at too many."""
        for bad in self.bad_images.collect(self.setup.ranks, self.setup.device):
            self._event("bad_image", **bad._asdict())
            self.warn(f"image {bad.image_id} was replaced: {bad.file}: {bad.problem}")
        self.bad_images.refuse_too_many()

    def _report_bad_steps(self, bad: list[BadStep]) -> None:
        """Name the images of steps that were left out, in RUN/nonfinite/ and to the user."""
        shares = distributed.gather([entry.image_ids for entry in bad], self.setup.ranks)
        for number, entry in enumerate(bad):
            ids = [i for share in shares for i in share[number]]
            self._event("nonfinite", bad_step=entry.step)
            if self.setup.ranks.is_first:
                content = json.dumps({"step": entry.step, "image_ids": ids})
                write_text(self.setup.out / "nonfinite" / f"step-{entry.step:08d}.json", content)
        self.warn(
            f"{len(bad)} steps up to step {bad[-1].step} had a NaN or infinite loss or "
            f"gradient and were left out; their images are in {self.setup.out / 'nonfinite'}"
        )

    def _roll_back(self) -> None:
        """Go back to the last checkpoint's weights, and on with the images that come next."""
        setup = self.setup
        checkpoint = None
        if setup.ranks.is_first:
            checkpoint, _ = self.checkpoints.newest_intact()
        checkpoint = distributed.broadcast(checkpoint, setup.ranks)
        if checkpoint is None:  # nothing saved yet; the bad steps moved nothing either
            return
        next_sample, bad_step = self._next_sample(), self.step
        load_state(setup.model, checkpoint.model, checkpoint.path)
        self.optimizer.load_state_dict(checkpoint.optimizer)
        self.first_sample, self.first_step, self.step = (
            next_sample,
            checkpoint.step,
            checkpoint.step,
        )
        self._start_input()
        self.saved_step = self.evaluated_step = None
        if setup.ranks.is_first:
            self.checkpoints.retire(self.step)
            self.metrics = MetricsFile(setup.out / "metrics.jsonl", self.step)
        self._save()  # so that a resume too goes on past the offending images
        self._event("rolled_back", from_step=bad_step)
        self.say(f"back to {checkpoint.path} (step {self.step}), past the images up to here")

    def _is_due(self, period: Every, last: float | None) -> bool:
        if period.steps is not None:
            return self.step % period.steps == 0
        assert period.seconds is not None
        assert last is not None
        is_time = time.monotonic() - last >= period.seconds
        return distributed.agree(is_time, self.setup.ranks, self.setup.device)

    def _reached_target(self) -> bool:
        target = self.setup.config.train.target_ap
        return target is not None and self.best_ap is not None and self.best_ap >= target

    def _stop_if_asked(self) -> None:
        asked = signals.stop_requested()
        if distributed.agree(asked is not None, self.setup.ranks, self.setup.device):
            self._save()
            self._event("stopped", signal=asked)
            # mpirun ends the others soon after the first rank is gone: not in mid-save.
            distributed.barrier(self.setup.ranks)
            raise Stopped(
                f"stopped by {asked or 'another rank'} after step {self.step}; "
                f"everything is saved in {self.setup.out}",
                hint="run the same command again to go on",
            )

    def _evaluate(self) -> None:
        if self.setup.val is None or self.evaluated_step == self.step:
            return
        distributed.average_batch_norms(self.setup.model, self.setup.ranks)
        scores = validate(self.setup)
        self.evaluated_step = self.step
        if scores is not None:
            self._record({"kind": "eval", **self._position(), **scores.figures})
            self._event("class_ap", AP={c.name: c.AP for c in scores.per_class})
        figure = distributed.broadcast(scores and scores.figures["AP"], self.setup.ranks)
        if figure is not None and (self.best_ap is None or figure > self.best_ap):
            self.best_ap = figure
            self._save(is_best=True)

    def _save(self, *, is_best: bool = False) -> None:
        if self.saved_step == self.step and not is_best:
            return
        setup = self.setup
        distributed.average_batch_norms(setup.model, setup.ranks)
        if setup.ranks.is_first:
            path = self.checkpoints.save(
                model=setup.model,
                architecture=setup.architecture,
                classes=setup.train.classes,
                config=values(setup.config),
                step=self.step,
                samples_seen=self._next_sample(),
                images=self.plan.images,
                global_batch=self.plan.global_batch_size,
                best_ap=self.best_ap,
                optimizer=self.optimizer,
            )
            if is_best:
                self.checkpoints.mark_best(path)
        self.saved_step, self.saved_at = self.step, time.monotonic()

    def _finish(self) -> Summary:
        was_finished = self.trained_images == 0 and self.evaluated_step == self.step
        if self.setup.val is None:
            self.say("no validation split: nothing to evaluate")
        self._evaluate()
        self._save()
        trained_s = time.monotonic() - self.started_at - self.paused_s
        summary = Summary(
            out=str(self.setup.out),
            step=self.step,
            images_per_second=round(self.trained_images / max(trained_s, 1e-9), 2),
            best_ap=self.best_ap,
            peak_memory_bytes=self.setup.device.peak_memory_bytes(),
            total_s=round(time.monotonic() - self.started_at, 1),
        )
        if not was_finished:
            facts = {k: v for k, v in summary._asdict().items() if k not in ("out", "step")}
            self._event("finished", **facts)
        return summary

    def _log_step(self, figures: dict[str, float], lr: float, rate: float) -> None:
        self._record(
            {
                "kind": "train",
                **self._position(),
                "loss": figures["loss"],
                "loss_box": figures["loss_box"],
                "loss_class": figures["loss_class"],
                "lr": lr,
                "images_per_second": round(rate, 3),
                "grad_norm": figures["grad_norm"],
            }
        )

    def _event(self, name: str, **facts: Any) -> None:
        self._record({"kind": "event", **self._position(), "event": name, **facts})

    def _position(self) -> Record:
        return {"step": self.step, "epoch": round(self.plan.epoch(self.step), 4)}

    def _record(self, record: Record) -> None:
        if self.setup.ranks.is_first:
            self.metrics.write(record)
            self._emit(record)


def _muted(speak: Callable[[Any], None], quiet: bool) -> Callable[[Any], None]:
    return (lambda _: None) if quiet else speak


def _plain(items: Any, **_: Any) -> Any:
    return items
