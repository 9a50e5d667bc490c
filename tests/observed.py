"""Records of a run for tests of observers, without a run."""

from pathlib import Path
from typing import Any

import torch
from tiny_network import settings

from ssdctl.input.open import fake_split
from ssdctl.model.loss import Losses
from ssdctl.runs.evaluation import Evaluation, EvaluationInfo
from ssdctl.training.observers import Epoch, Scored, Start, Step, StepMetrics
from ssdctl.training.plan import Plan
from ssdctl.training.step import StepResult


def plan_of(images: int, out: Path = Path("run"), **changes: Any) -> Plan:
    given = {"preset": "stable-r34", "warmup": "0st", **changes}
    return Plan(settings(**given), out, images, 1)


def start_of(plan: Plan, val_images: int = 0, past: Any = ()) -> Start:
    return Start(0, plan, "cpu", 1, 1, fake_split(), None, val_images, past)


def step_of(step: int, *, epoch: float = 1.0, is_logged: bool = True, **values: Any) -> Step:
    zero = torch.zeros(())
    metrics = StepMetrics(1.0 / step, 0.0, 1.0, 0.1, 4.0, 1.0, 0.0, 0)._replace(**values)
    result = StepResult(Losses(zero + metrics.loss, zero, zero), zero, zero)
    return Step(step, epoch, 0.1, 0.0, result, metrics if is_logged else None)


def epoch_of(step: int, epoch: int, duration_s: float) -> Epoch:
    return Epoch(step, epoch, duration_s, 4.0)


def scored(step: int, **metrics: float) -> Scored:
    loss = {"loss": metrics.pop("loss")} if "loss" in metrics else {}
    about = EvaluationInfo(source="best.pt", step=step, data="data", store="store", split="val")
    evaluation = Evaluation(about, metrics, [], {}, [], [], None, [], [])
    return Scored(step, evaluation, loss, False)
