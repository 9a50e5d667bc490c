"""Measure the rates of writing and reading an unnamed file in a folder, as lines of JSON.

The file has no name, so nothing remains even if the process is killed. Runs as a
subprocess, because a process that accesses a dead network file system hangs.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

from ssdctl.doctor.subprocess_probe import report

SIZE, BLOCK = 64 * 2**20, 4 * 2**20
DEADLINE_S = 8.0  # a slow disk is measured with fewer bytes


def main(folder: str) -> None:
    noise = os.urandom(BLOCK)  # cannot be compressed by the file system
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start, written = time.perf_counter(), 0
        while written < SIZE and time.perf_counter() - start < DEADLINE_S:
            written += file.write(noise)
        os.fsync(file.fileno())
        report(write=written / (time.perf_counter() - start))
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # out of the page cache
        file.seek(0)
        start, got = time.perf_counter(), 0
        while block := file.read(BLOCK):
            got += len(block)
            if time.perf_counter() - start > DEADLINE_S:
                break
        report(read=got / (time.perf_counter() - start))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as problem:
        sys.exit(f"{problem.strerror}")
