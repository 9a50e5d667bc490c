"""Plans of launches, and the random arguments of their commands."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from hypothesis import strategies as st

from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.config.sections import LaunchConfig
from ssdctl.launch import LaunchPlan, LaunchRequest, Node, make_plan

# Valid arguments: any text without NUL and lone surrogates.
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))
ARGUMENTS = st.lists(TEXT)
SMALL = Node(2, 1)
# Options of `launch` for a training in a pod.
IN_A_POD: list[Any] = ["--cpus", 1, "--launcher", "kubernetes", "--out", "/runs/first"]
for _setting in ("image=a", "install=image", "volumes=claim:/runs"):
    IN_A_POD += ["--set", f"kubernetes.{_setting}"]
FIELDS = {field.name for field in dataclasses.fields(LaunchRequest)}


def plan_for(device: str, count: int, *command: str, node: Node = SMALL, **more: Any) -> LaunchPlan:
    """Return the plan of a request; `more` are fields of it or of its config."""
    given = {name: more.pop(name) for name in FIELDS & more.keys()}
    given.setdefault("launcher", DEVICE_TYPES[device].launcher)
    request = LaunchRequest(
        device=device,
        count=count,
        command=command or ("train",),
        config=LaunchConfig(**more),
        **{"python": sys.executable, "free_port": 40000, **given},
    )
    return make_plan(request, node)
