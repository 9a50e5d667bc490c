"""Plans of Slurm jobs."""

from __future__ import annotations

import sys
from typing import Any

from ssdctl.config.sections.launch import LaunchConfig
from ssdctl.launch.base import LaunchPlan, LaunchRequest, Node, make_plan
from ssdctl.launch.slurm import Settings


def plan_for(
    device: str, count: int, *command: str, slurm: dict[str, Any] | None = None, **launch: Any
) -> LaunchPlan:
    request = LaunchRequest(
        device=device,
        count=count,
        command=command or ("train",),
        config=LaunchConfig(launcher="slurm", **launch),
        python=sys.executable,
        table=Settings(**(slurm or {})),
    )
    return make_plan(request, Node(2, 1))
