"""Keep freed memory in the process (glibc), for the commands that compute.

By default glibc gives every tensor of some megabytes back to the system when it is freed, and the
next step pays a page fault for each 4 KB of it again. Steps need the same memory each time, so they
keep it; the peak grows by some percent (benchmarks/RESULTS.md). It is for the whole process, so
the command line's affair: `ssdctl.load` changes nothing in the program of its user.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

# malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
NEVER = 2**31 - 1
STEP_BYTES = 64 << 20  # by which the heap grows
# Whoever sets these knows what they want.
USERS_WISHES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "LD_PRELOAD")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have malloc keep what is freed, for the whole process; whether it will."""
    if any(name in environment for name in USERS_WISHES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another libc
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, STEP_BYTES))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)
