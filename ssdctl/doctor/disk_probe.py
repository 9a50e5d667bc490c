"""Write a nameless file to a folder and read it back: bytes and seconds, as lines of JSON.

Nothing is left behind, even by a kill: the file never had a name. Run as a program, since a dead
network file system keeps whoever touches it.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time

SIZE, BLOCK = 64 * 2**20, 4 * 2**20
DEADLINE_S = 8.0  # a slow disk is judged by less


def main(folder: str) -> None:
    noise = os.urandom(BLOCK)  # nothing that a file system could compress
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start, written = time.perf_counter(), 0
        while written < SIZE and time.perf_counter() - start < DEADLINE_S:
            written += file.write(noise)
        os.fsync(file.fileno())
        _tell("write", written, time.perf_counter() - start)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # out of the page cache
        file.seek(0)
        start, got = time.perf_counter(), 0
        while block := file.read(BLOCK):
            got += len(block)
            if time.perf_counter() - start > DEADLINE_S:
                break
        _tell("read", got, time.perf_counter() - start)


def _tell(what: str, num_bytes: int, spent_s: float) -> None:
    sys.stdout.write(json.dumps({what: num_bytes / spent_s}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except OSError as problem:
        sys.exit(f"{problem.strerror}")
