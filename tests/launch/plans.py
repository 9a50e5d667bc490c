"""Plans of launches."""

import dataclasses
import sys
from typing import Any

from ssdctl.config.fields import DEVICE_TYPES
from ssdctl.config.sections import LaunchConfig
from ssdctl.launch.base import Job, LaunchRequest, Node, load_engine, make_job
from ssdctl.launch.engines.kubernetes import Kubernetes
from ssdctl.launch.engines.mpirun import Mpirun
from ssdctl.launch.engines.slurm import Slurm
from ssdctl.launch.engines.torchrun import Torchrun

SMALL = Node(2, 1)
# Options of `launch` for a training in a pod.
IN_A_POD: list[Any] = ["--cpus", 1, "--launcher", "kubernetes", "--out", "/runs/first"]
for _setting in ("image=a", "install=image", "volumes=claim:/runs"):
    IN_A_POD += ["--set", f"kubernetes.{_setting}"]
FIELDS = {field.name for field in dataclasses.fields(LaunchRequest)}
ENGINES: tuple[Any, ...] = (Torchrun, Mpirun, Slurm, Kubernetes)
FACTS = {field.name for engine in ENGINES for field in dataclasses.fields(engine)}


def plan_for(device: str, count: int, *command: str, node: Node = SMALL, **more: Any) -> Job:
    """Return the job of a request; `more` are fields of it, of its config or of a launcher."""
    engine: Any = load_engine(more.pop("launcher", DEVICE_TYPES[device].launcher))
    own = {field.name for field in dataclasses.fields(engine)}
    facts = {"port": 40000, **{name: more.pop(name) for name in FACTS & more.keys()}}
    given = {name: more.pop(name) for name in FIELDS & more.keys()}
    request = LaunchRequest(
        device=device,
        count=count,
        command=command or ("train",),
        config=LaunchConfig(**more),
        **{"python": sys.executable, **given},
    )
    return make_job(engine(**{n: v for n, v in facts.items() if n in own}), request, node)
