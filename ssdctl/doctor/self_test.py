"""Run three tests one after the other: the disk's rate, an all-reduce of two ranks, a step."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future

import msgspec

from ssdctl.config import Config, Resolved
from ssdctl.config.resolve import sources_of
from ssdctl.data.store_folder import dataset_folders
from ssdctl.doctor.check import Check, ProgramOutput, Programs, bad, ok
from ssdctl.doctor.data import nearest_folder
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


def self_test(config: Config, programs: Programs) -> list[Check]:
    """Run the three tests in the data folder and on the device of a config."""
    log.info("self-test: the disk's rate at the data folder")
    results = [_disk(config, programs)]
    log.info("self-test: two ranks average a tensor")
    results.append(_ranks(programs))
    log.info("self-test: a training step on --device %s", config.train.device)
    return [*results, _step(config, programs)]


def _disk(config: Config, programs: Programs) -> Check:
    _, store = dataset_folders(config.data)
    folder = nearest_folder(store)
    if free_bytes(folder) < DISK_NEEDS:
        return bad("disk rate", f"{folder}: too full to write 64 MB", "free some space")
    answer = programs.run_probe("disk", DISK_S, str(folder))
    rates = answer.facts()
    if "write" not in rates:
        remedy = "--data only needs to be readable; put --store DIR and --out RUN on another disk"
        return bad("disk rate", f"{folder}: {answer.problem}", remedy)
    detail = f"{folder}: write {rates['write'] / 1e6:,.0f} MB/s"
    if answer.problem or "read" not in rates:
        return bad("disk rate", f"{detail}, read: {answer.problem}", "check the disk's log")
    images = rates["read"] / IMAGE_BYTES
    detail += f", read {rates['read'] / 1e6:,.0f} MB/s (about {images:,.0f} images/s)"
    if rates["read"] < SLOW_DISK:
        remedy = "copy the data to a local disk, or shrink the store: ssdctl prepare --shrink 512"
        return bad("disk rate", detail, remedy)
    return ok("disk rate", detail)


def _ranks(programs: Programs) -> Check:
    """Start two ranks, without the variables of a job that this process belongs to."""
    start = time.perf_counter()
    common = {**_without_job(), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())

    def run(rank: str) -> Future[ProgramOutput]:
        environment = {**common, "RANK": rank, "LOCAL_RANK": rank}
        return run_in_daemon_thread(
            lambda: programs.run_probe("ranks", RANKS_S, environment=environment)
        )

    answers = [answer.result() for answer in [run("0"), run("1")]]
    if problems := [f"rank {i}: {a.problem}" for i, a in enumerate(answers) if a.problem]:
        remedy = (
            "the machine's own name must resolve (/etc/hosts) and loopback must be open; "
            "GLOO_SOCKET_IFNAME=lo restricts gloo to loopback"
        )
        return bad("all-reduce", "; ".join(problems), remedy, is_wanted=True)
    facts, spent = answers[0].facts(), time.perf_counter() - start
    what = f"{facts['bytes'] / 1e6:.0f} MB in {1000 * facts['all_reduce_s']:.1f} ms"
    return ok("all-reduce", f"two ranks over gloo: {what}; {spent:.1f} s in all")


def _without_job() -> dict[str, str]:
    return {
        name: value
        for name, value in os.environ.items()
        if name not in JOB_VARIABLES and not name.startswith(JOB_PREFIXES)
    }


def _step(config: Config, programs: Programs) -> Check:
    start = time.perf_counter()
    text = msgspec.json.encode(Resolved(config, sources_of(config))).decode()
    answer = programs.run_probe("step", STEP_S, text=text, environment=_without_job())
    facts = answer.facts()
    where = f"--device {config.train.device}"
    if "device" in facts:
        how = f"{facts['precision']}, {facts['execution']}"
        where += f" is {facts['device']}: {facts['label']}, {how}"
    if answer.problem or "loss" not in facts:
        remedy = "the results above list what is missing; --device cpu tests without the card"
        return bad("train step", f"{where}: {answer.problem}", remedy, is_wanted=True)
    times = f"first {facts['first_s']:.1f} s, then {facts['step_s']:.2f} s"
    spent = time.perf_counter() - start
    return ok("train step", f"{where}; ResNet-18, 1 image: {times}; {spent:.1f} s in all")
