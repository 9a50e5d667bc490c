"""Run three tests: the disk's rate, an all-reduce of two ranks, a training step.

They run one after the other, so that they do not slow each other down.
"""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future

import msgspec

from ssdctl.config import Config, Resolved
from ssdctl.config.resolve import sources_of
from ssdctl.data.store_folder import dataset_folders
from ssdctl.doctor.check import FAIL, OK, WARN, CheckResult
from ssdctl.doctor.data import nearest_folder
from ssdctl.doctor.subprocess_probe import ProbeOutput, ProbeRunner
from ssdctl.files import free_bytes
from ssdctl.launch.run import free_port
from ssdctl.runtime.background import run_in_daemon_thread

log = logging.getLogger(__name__)
DISK_S, RANKS_S, STEP_S = 40.0, 120.0, 400.0  # a first step may have to be compiled
DISK_NEEDS = 256 * 2**20
IMAGE_BYTES = 163_000  # of COCO's, on average
SLOW_DISK = 50e6  # bytes/s: a slower disk cannot supply two cores
JOB_PREFIXES = ("OMPI_", "SLURM_", "PMI", "TORCHELASTIC_")
JOB_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


def self_test(config: Config, runner: ProbeRunner) -> list[CheckResult]:
    """Run the three tests.

    Args:
        config: Names the data folder and the device (`auto` unless the user chose).
        runner: Runs the probes.
    """
    log.info("self-test: the disk's rate at the data folder")
    results = [_disk(config, runner)]
    log.info("self-test: two ranks average a tensor")
    results.append(_ranks(runner))
    log.info("self-test: a training step on --device %s", config.train.device)
    return [*results, _step(config, runner)]


def _disk(config: Config, runner: ProbeRunner) -> CheckResult:
    _, store = dataset_folders(config.data)
    folder = nearest_folder(store)
    if free_bytes(folder) < DISK_NEEDS:
        return CheckResult(
            "disk rate", WARN, f"{folder}: too full to write 64 MB", "free some space"
        )
    answer = runner.run_probe("disk", DISK_S, str(folder))
    rates = answer.facts()
    if "write" not in rates:
        remedy = "--data only needs to be readable; put --store DIR and --out RUN on another disk"
        return CheckResult("disk rate", WARN, f"{folder}: {answer.problem}", remedy)
    detail = f"{folder}: write {rates['write'] / 1e6:,.0f} MB/s"
    if answer.problem or "read" not in rates:
        return CheckResult(
            "disk rate", WARN, f"{detail}, read: {answer.problem}", "check the disk's log"
        )
    images = rates["read"] / IMAGE_BYTES
    detail += f", read {rates['read'] / 1e6:,.0f} MB/s (about {images:,.0f} images/s)"
    if rates["read"] < SLOW_DISK:
        remedy = "copy the data to a local disk, or shrink the store: ssdctl prepare --shrink 512"
        return CheckResult("disk rate", WARN, detail, remedy)
    return CheckResult("disk rate", OK, detail)


def _ranks(runner: ProbeRunner) -> CheckResult:
    start = time.perf_counter()
    answers = [answer.result() for answer in _start_ranks(runner, free_port())]
    spent = time.perf_counter() - start
    problems = [f"rank {i}: {a.problem}" for i, a in enumerate(answers) if a.problem]
    if problems:
        remedy = (
            "the machine's own name must resolve (/etc/hosts) and loopback must be open; "
            "GLOO_SOCKET_IFNAME=lo restricts gloo to loopback"
        )
        return CheckResult("all-reduce", FAIL, "; ".join(problems), remedy)
    facts = answers[0].facts()
    detail = (
        f"two ranks over gloo: {facts['bytes'] / 1e6:.0f} MB in "
        f"{1000 * facts['all_reduce_s']:.1f} ms; {spent:.1f} s in all"
    )
    return CheckResult("all-reduce", OK, detail)


def _start_ranks(runner: ProbeRunner, port: int) -> list[Future[ProbeOutput]]:
    """Start two ranks, without the variables of a job that this process belongs to."""
    clean = _without_job()

    def start(rank: int) -> Future[ProbeOutput]:
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment = {**clean, **own, **where}
        return run_in_daemon_thread(
            lambda: runner.run_probe("ranks", RANKS_S, environment=environment)
        )

    return [start(0), start(1)]


def _without_job() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in JOB_VARIABLES and not name.startswith(JOB_PREFIXES)
    }


def _step(config: Config, runner: ProbeRunner) -> CheckResult:
    start = time.perf_counter()
    text = msgspec.json.encode(Resolved(config, sources_of(config))).decode()
    answer = runner.run_probe("step", STEP_S, text=text, environment=_without_job())
    facts = answer.facts()
    where = f"--device {config.train.device}"
    if "device" in facts:
        how = f"{facts['precision']}, {facts['execution']}"
        where += f" is {facts['device']}: {facts['label']}, {how}"
    if answer.problem or "loss" not in facts:
        remedy = "the results above list what is missing; --device cpu tests without the card"
        return CheckResult("train step", FAIL, f"{where}: {answer.problem}", remedy)
    spent = time.perf_counter() - start
    detail = (
        f"{where}; ResNet-18, 1 image: first {facts['first_s']:.1f} s, then "
        f"{facts['step_s']:.2f} s; {spent:.1f} s in all"
    )
    return CheckResult("train step", OK, detail)
