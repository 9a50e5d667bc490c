"""Mutated input of every parser ends with an exit code of the contract, never as a bug.

A few inputs of each, always the same ones; as a slow test others, for a minute or FUZZ_S seconds. Each bug is printed with one input
that shows it, which becomes a test of its parser.
"""

import gc
import os
import re
import resource
import sys
import time
from collections import Counter
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fuzz.targets import TARGETS, Target
from helpers import check_examples

from ssdctl.errors import ExitCode

SECONDS = float(os.environ.get("FUZZ_S", "60"))
EXAMPLES = 6  # in the default suite
ROUND = 200  # examples between two looks at the clock
MAX_GROWTH_BYTES = 1 << 30  # this process's memory
BUG = re.compile("Traceback|this is a bug", re.IGNORECASE)
CONTRACT = frozenset(ExitCode) - {ExitCode.BUG, ExitCode.INTERRUPTED}


class Outcome(NamedTuple):
    """What became of the inputs."""

    ends: Counter[tuple[int, bool]]  # their number by exit code and whether there was a message
    bugs: dict[str, Any]  # an input for each bug, by its place in the code


def fuzz(
    target: Target, count: int, outcome: Outcome, *, seed: int | None = None, limit: float = inf
) -> None:
    """Run a target on `count` inputs, or until the time `limit`. Without a seed: always the same."""

    def check(content: Any) -> None:
        if time.monotonic() > limit:
            return
        result = target.run(content)
        outcome.ends[result.code, bool(result.err)] += 1
        if result.code not in CONTRACT or BUG.search(result.err):
            place = "\n".join(re.findall(r"^ +File .*|^\w.*", result.err, re.MULTILINE)[-4:])
            outcome.bugs.setdefault(place or result.err, content)

    check_examples(check, count, seed, shrinks=False, content=target.inputs)


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        *((name, 0) for name in TARGETS if name != "report"),
        *(pytest.param(name, SECONDS, marks=pytest.mark.slow) for name in TARGETS),
    ],
)
@pytest.mark.filterwarnings("default")  # a command prints warnings, which is allowed
def test_mutated_inputs(
    name: str, seconds: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = Outcome(Counter(), {})
    limit = time.monotonic() + seconds
    seed = time.time_ns() if seconds else None
    with contextmanager(TARGETS[name])(tmp_path) as target:
        fuzz(target, ROUND if seconds else EXAMPLES, outcome, seed=seed)
        if seconds:
            gc.collect()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        while time.monotonic() < limit:
            fuzz(target, ROUND, outcome, seed=time.time_ns(), limit=limit)
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    bugs = "\n".join(f"{place}\n  input: {value!r:.1000}" for place, value in outcome.bugs.items())
    if seconds:
        codes = ", ".join(f"{n} x exit {code}" for (code, _), n in sorted(outcome.ends.items()))
        with capsys.disabled():
            sys.stdout.write(f"\n{name}: {outcome.ends.total():,} inputs: {codes}\n{bugs}")
            sys.stdout.flush()
        assert len(outcome.ends) > 1, "every input had the same end"
    assert outcome.ends.total() >= EXAMPLES
    assert not outcome.bugs, bugs
    assert growth < MAX_GROWTH_BYTES
