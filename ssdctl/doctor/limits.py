"""Check shared memory and the resource limits of this process."""

from __future__ import annotations

import os
from pathlib import Path

from ssdctl.doctor.check import OK, WARN, CheckResult
from ssdctl.doctor.hardware import Hardware
from ssdctl.runtime.system import UNLIMITED, resource_limit

SHM = Path("/dev/shm")
SHM_WANTED = 2**30  # what collectives between the cards of a node need, with a margin
FILES_WANTED = 4096  # shards, connections, logs; a connection or two per rank
FILES_NEEDED = 1024


def check_limits(pci: Hardware) -> list[CheckResult]:
    """Return the results for shared memory, locked memory and open files."""
    checks = [_shared_memory(pci), _locked_memory(pci), _open_files()]
    return [check for check in checks if check is not None]


def _shared_memory(pci: Hardware) -> CheckResult:
    try:
        disk = os.statvfs(SHM)
    except OSError as error:
        return CheckResult(
            "/dev/shm", WARN, f"absent: {error.strerror}", "mount -t tmpfs tmpfs /dev/shm"
        )
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    detail = f"{free / 2**30:.1f} GiB free of {size / 2**30:.1f}"
    if free < SHM_WANTED and pci.has_cards:
        remedy = (
            "ranks of a node share it: docker run --shm-size=8g; in Kubernetes an emptyDir "
            "with medium Memory on /dev/shm"
        )
        return CheckResult("/dev/shm", WARN, detail, remedy)
    return CheckResult("/dev/shm", OK, detail)


def _locked_memory(pci: Hardware) -> CheckResult | None:
    limits = resource_limit("MEMLOCK")
    if limits is None:
        return None
    soft, _ = limits
    if soft == UNLIMITED:
        return CheckResult("locked memory", OK, "unlimited")
    detail = f"limit {soft / 2**20:,.1f} MiB"
    if pci.has_rdma or pci.num_gaudi:
        remedy = (
            "RDMA and Gaudi lock their buffers: ulimit -l unlimited; docker run --ulimit "
            "memlock=-1; Slurm: PropagateResourceLimitsExcept=MEMLOCK"
        )
        return CheckResult("locked memory", WARN, detail, remedy)
    return CheckResult("locked memory", OK, f"{detail}; it matters only for RDMA and Gaudi")


def _open_files() -> CheckResult | None:
    limits = resource_limit("NOFILE")
    if limits is None:
        return None
    soft, hard = limits
    is_raisable = hard == UNLIMITED or hard >= FILES_WANTED
    if soft == UNLIMITED or soft >= FILES_NEEDED:
        return CheckResult(
            "open files", OK, "unlimited" if soft == UNLIMITED else f"limit {soft:,}"
        )
    remedy = f"ulimit -n {FILES_WANTED if is_raisable else hard}"
    if not is_raisable and hard < FILES_NEEDED:
        remedy = f"raise the hard limit of {hard:,} (nofile in /etc/security/limits.conf)"
    return CheckResult("open files", WARN, f"limit {soft:,}", remedy)
