"""What tests of several packages share: processes, ranks, the files of runs, installed packages."""

import contextlib
import importlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from conftest import TINY_RUN, Result
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import seed as with_seed
from hypothesis.internal.conjecture import engine

from ssdctl.checkpoint.file import load_checkpoint
from ssdctl.checkpoint.format import Checkpoint
from ssdctl.cli.main import main
from ssdctl.distributed import free_port

Train = Callable[..., str]  # the fixture `train`: options, out, data, code -> the error text
engine.MAX_SHRINKING_SECONDS = 60  # 300 by default, more than a machine's small budget


class ForkedProcess:
    """A fork of this process that calls a function; used as `subprocess.Popen`.

    It must not score detections itself (training does it in another process): hotcoco's threads,
    which this process may have started, do not exist in a fork.

    Args:
        work: Called in the fork. The exit code is that of its SystemExit, 1 for another
            exception, else 0.
        variables: Added to the environment.
    """

    def __init__(self, work: Callable[[], object], **variables: str) -> None:
        importlib.import_module("ssdctl.training.setup")
        self._out, self._err = os.memfd_create("out"), os.memfd_create("err")
        self.returncode: int | None = None
        self.pid = fork()
        if self.pid == 0:
            os._exit(self._run(work, variables))

    def _run(self, work: Callable[[], object], variables: dict[str, str]) -> int:
        """Work with its own output; never raise, since the fork must not continue a test."""
        try:
            os.environ.update(variables)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(self._out, 1)
            os.dup2(self._err, 2)
            sys.stdout, sys.stderr = (
                io.TextIOWrapper(io.FileIO(n, "w", closefd=False), write_through=True)
                for n in (1, 2)
            )
            warnings.resetwarnings()
            warnings.simplefilter("default")
            signal.signal(signal.SIGINT, signal.default_int_handler)
            work()
            code = 0
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException:
            traceback.print_exc()
            code = 1
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        return code

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("fork", timeout)
            time.sleep(0.005)
        return code

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end, or kill it; return the output and the error text."""
        try:
            self.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        return self.output(), _content(self._err)

    def output(self) -> str:
        """Return the output so far."""
        return _content(self._out)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _content(descriptor: int) -> str:
    """Return what is in a file that a fork writes to, without moving its position."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode()


def fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads do not matter
        return os.fork()


def wait_for(
    condition: Callable[[], Any], process: ForkedProcess | None = None, timeout_s: float = 120
) -> Any:
    """Return the condition's value as soon as it is true; fail if the process ends before."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if value := condition():
            return value
        assert process is None or process.poll() is None, process and process.communicate()
        time.sleep(0.01)
    raise AssertionError(f"did not happen within {timeout_s} s")


def is_alive(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def run_script(script: str, *arguments: object, **variables: str) -> ForkedProcess:
    """Start a script in a fork; `sys.argv[1:]` are the arguments."""

    def run() -> None:
        sys.argv = ["script", *map(str, arguments)]
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})

    return ForkedProcess(run, **variables)


def start_script(script: str, *arguments: object, **variables: str) -> subprocess.Popen[str]:
    """Start a script in a new interpreter: it may score detections, which a fork must not."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_ranks(
    count: int,
    script: str,
    *arguments: object,
    start: Callable[..., ForkedProcess | subprocess.Popen[str]] = run_script,
    **variables: str,
) -> list[Result]:
    """Run a script in processes that form a group."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    common["WORLD_SIZE"] = str(count)
    ranks = [
        start(script, *arguments, **{**common, **variables, "RANK": r, "LOCAL_RANK": r})
        for r in map(str, range(count))
    ]
    try:
        outputs = [rank.communicate() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [Result(rank.wait(1), *o) for rank, o in zip(ranks, outputs, strict=True)]


def start(*arguments: object, **variables: str) -> ForkedProcess:
    """Start `ssdctl ARGUMENTS` in a fork."""
    return ForkedProcess(lambda: main([str(a) for a in arguments]), **variables)


def train_command(data: Path, run: Path, *options: object) -> list[object]:
    """Return the arguments of a training of the tiny network."""
    return ["train", "--data", data, "--out", run, *TINY_RUN.split(), *options]


def has_steps(run: Path, count: int = 1) -> bool:
    """Return whether a run has recorded more than `count` steps."""
    return len(records(run, "train")) > count


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [r for r in map(json.loads, lines) if r["kind"] == kind]


def last(run: Path) -> Checkpoint:
    return load_checkpoint(run / "checkpoints" / "last.pt")


def assert_same_state(actual: Checkpoint, expected: Checkpoint) -> None:
    assert actual.step == expected.step
    for name, tensor in actual.model.items():
        assert torch.equal(tensor, expected.model[name]), name
    for key, state in actual.optimizer["state"].items():
        for name, value in state.items():
            assert torch.equal(
                torch.as_tensor(value), torch.as_tensor(expected.optimizer["state"][key][name])
            )


SEED = int(os.environ.get("SEED", time.time_ns() % 2**32))


def seeds() -> Iterator[int]:
    """Yield the variable SEED, or a new seed, and those after it, for MINUTES (30)."""
    end = time.monotonic() + 60 * float(os.environ.get("MINUTES", "30"))
    for number in itertools.count(SEED):
        yield number
        if time.monotonic() > end:
            break


def seeded(test: Any, number: int | None) -> Any:
    return test if number is None else with_seed(number)(test)


def check_examples(
    check: Any, count: int, number: int | None, *, shrinks: bool = True, **strategies: Any
) -> None:
    """Call a function with `count` examples of its arguments; without a seed always the same."""

    def test(**drawn: Any) -> None:
        note(f"SEED={number}")
        check(**drawn)

    how = examples(count, number, *[Phase.shrink] * shrinks)
    how(seeded(given(**strategies)(test), number))()


def examples(count: int, number: int | None, *phases: Phase, **options: Any) -> settings:
    """Return the settings of random examples; without a seed the profile decides if they vary."""
    return settings(
        max_examples=count,
        database=None,
        derandomize=number is None and bool(settings.default and settings.default.derandomize),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate, *phases],
        report_multiple_bugs=False,
        **options,
    )
