"""Freed memory stays in the process; threads switch sooner."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ssdctl.runtime.system import keep_freed_memory

SCRIPT = """
import resource, sys
from ssdctl.runtime.system import keep_freed_memory, tune_process

before = sys.getswitchinterval()
if sys.argv[1] == "keep":
    tune_process()
    assert sys.getswitchinterval() < before / 10
    if not keep_freed_memory():
        sys.exit(3)
for _ in range(20):
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = bytearray(50_000_000)
    for place in range(0, len(block), 4096):
        block[place] = 1
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun)
"""


def page_faults(how: str) -> int:
    """Of the last of many allocations of 50 MB."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip("no glibc, or its settings are the user's")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_an_allocation_finds_the_pages_of_the_one_before() -> None:
    assert page_faults("keep") < 100 < 5000 < page_faults("leave")


def test_the_users_settings_take_precedence() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "1"})


STARTED = """
import contextlib, os, sys
os.getloadavg = lambda: (float(sys.argv.pop()), 0, 0)
from ssdctl.__main__ import run
with contextlib.suppress(SystemExit):
    run()
assert "torch" not in sys.modules, "too late for libgomp"
print(os.environ.get("GOMP_SPINCOUNT"))
"""


def spins(load: float, **variables: str) -> str:
    """Return the variable of libgomp after the start of a command."""
    environment = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", STARTED, "config", "presets", "--json", str(load)],
        capture_output=True,
        text=True,
        env=environment | variables,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_threads_wait_less_actively_and_least_on_a_busy_machine() -> None:
    cores = os.cpu_count() or 1
    idle, busy = int(spins(0.5 * cores)), int(spins(3 * cores))
    assert 0 < busy < idle < 300_000


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"])
def test_the_users_way_of_waiting_is_kept(name: str) -> None:
    assert spins(0, **{name: "7"}) == ("7" if name == "GOMP_SPINCOUNT" else "None")
