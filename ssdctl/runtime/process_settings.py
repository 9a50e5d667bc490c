"""Process-wide settings of the commands that compute.

Keep freed memory (glibc). By default glibc returns the memory of a freed tensor of some megabytes
to the system, and the next step causes a page fault for each 4 KB of it. Every step needs the same
memory, so it is kept; the peak grows by some percent (benchmarks/RESULTS.md).

Switch threads sooner. By default a thread that needs the interpreter waits up to 5 ms for another
one, in which a decode thread could have decoded an image.

Limit torch's threads to the CPU quota of the container: threads beyond it are throttled together,
often while one of them holds a lock.

Let torch's OpenMP threads wait less actively. After each operation a thread of GNU's libgomp spins
for milliseconds until the others are done. On a busy machine the others are not running, and the
spinning uses up the process's share of the cores: sleeping sooner made training 2 to 5 times as
fast. The shortest time costs some percent of the speed of an idle machine, so only a machine that
is busy at the start gets it (benchmarks/RESULTS.md, "A busy machine"). Results do not change.

Only the command line makes these settings: `ssdctl.load` changes nothing in the user's program.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, MutableMapping

from ssdctl.runtime.cores import quota_cores

# malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER = 2**31 - 1
STEP_BYTES = 64 << 20  # step of heap growth
# If the user sets one of these, nothing is changed.
USER_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "LD_PRELOAD")

SWITCH_INTERVAL_S = 5e-5
# If the user sets one of these, the number or the waiting of torch's threads is not changed.
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
SPINS, FEW_SPINS = 10_000, 1_000  # tries before a thread sleeps; libgomp's default is 300,000
BUSY = 2.0  # processes that are ready to run, per core of the machine


def limit_threads(environment: MutableMapping[str, str] = os.environ) -> None:
    """Limit torch's threads to the CPU quota; call it before torch is loaded."""
    quota = quota_cores()
    if quota is not None and not any(name in environment for name in THREADS):
        environment["OMP_NUM_THREADS"] = str(quota)


def shorten_waiting(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let the threads of libgomp sleep sooner while they wait; call it before torch is loaded."""
    if any(name in environment for name in WAITING):
        return
    is_busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    environment["GOMP_SPINCOUNT"] = str(FEW_SPINS if is_busy else SPINS)


def tune_process() -> None:
    """Keep freed memory and switch threads sooner, process-wide."""
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let malloc keep freed memory, process-wide; return whether it does."""
    if any(name in environment for name in USER_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another libc
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, STEP_BYTES))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)
