"""Slurm: the script as text; process/test_slurm.py runs it."""

import shlex
from typing import Any

import pytest
from launch import plans

from ssdctl.config.sections import SlurmConfig
from ssdctl.errors import UsageError
from ssdctl.launch.base import Job


def plan_for(*arguments: Any, slurm: dict[str, Any] | None = None, **more: Any) -> Job:
    settings = SlurmConfig(**(slurm or {}))
    return plans.plan_for(*arguments, launcher="slurm", settings=settings, **more)


def directives(plan: Job) -> list[str]:
    """The options as sbatch reads them: up to the first line that is not a comment."""
    assert plan.text is not None
    head = plan.text.partition("\nset -u\n")[0]
    return [shlex.split(line)[1] for line in head.splitlines() if "#SBATCH" in line]


def test_options_for_slurm() -> None:
    settings = {"time": "1-00:00:00", "constraint": "[a|b]", "options": ("--output=/logs/%j.out",)}
    plan = plan_for("hpu", 16, nodes=2, cores_per_node=48, slurm=settings)
    assert " ".join(directives(plan)) == (
        "--job-name=ssdctl --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpus-per-task=6 "
        "--hint=nomultithread --gres=hpu:8 --constraint=[a|b] --time=1-00:00:00 --signal=USR1@300 "
        "--open-mode=append --requeue --output=/logs/%j.out"
    )
    assert "--gres=gpu:4" in directives(plan_for("cuda", 4))
    assert not any("gres" in d for d in directives(plan_for("cuda", 4, slurm={"gres": "none"})))


@pytest.mark.parametrize(
    ("time", "is_enough"),
    [
        *(("6", False), ("7", True), ("5:59", False), ("0:06:01", True), ("0-1", True)),
        *(("0", True), ("UNLIMITED", True), ("INFINITE", True)),
    ],
)
def test_a_job_that_would_be_requeued_for_ever_is_refused(time: str, is_enough: bool) -> None:
    """Its ranks would be stopped 300 s before the end, before they had started."""
    if is_enough:
        text = plan_for("cuda", 8, slurm={"time": time}).text
        assert f"#SBATCH --time={time}\n" in str(text)
        return
    with pytest.raises(UsageError, match=rf"slurm\.time: {time} "):
        plan_for("cuda", 8, slurm={"time": time})
    assert plan_for("cuda", 8, slurm={"time": time, "requeue": False}).text
