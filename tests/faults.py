"""Commands in forks of a process that has everything imported, with a fault at a file operation.

A run folder changes only at file operations: a process that is killed at each of them that finds
another folder than the one before has been killed at every moment that makes a difference.
"""

import contextlib
import errno
import multiprocessing
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ssdctl.distributed import free_port

IMPORTED = """
    pytest pandas pydantic hotcoco PIL.BmpImagePlugin PIL.GifImagePlugin PIL.JpegImagePlugin
    PIL.PngImagePlugin PIL.PpmImagePlugin rich.table rich.jupyter typer._adapters safetensors.torch
    encodings.utf_8_sig ssdctl.cli.main ssdctl.training.setup ssdctl.evaluation.evaluate
    ssdctl.evaluation.analysis ssdctl.reporting.page ssdctl.inference.predict ssdctl.inference.save
    ssdctl.exporting.deployed ssdctl.model.backbones.resnet ssdctl.cli.results
"""
CREATING = {"os.link", "os.mkdir", "os.truncate"}
RENAMED = "tests.renamed"
CHANGING = {"os.rename", "os.remove", "os.rmdir", RENAMED, *CREATING}
DEADLINE_S = 120.0
GRACE_S = 10.0
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(IMPORTED.split())


class Fault(NamedTuple):
    """What happens at a file operation below a folder.

    A signal comes at the operation. An error is raised by it and by all later ones that need space.
    """

    at: int  # counted from 1; for SIGKILL only operations that find another folder
    name: str  # of a signal or an error
    rank: int = 0  # where; the last rank if there are fewer

    @property
    def is_signal(self) -> bool:
        return self.name.startswith("SIG")


class Command:
    """`ssdctl ARGUMENTS` in a fork for each rank, which scores evaluations in a thread.

    Args:
        folder: The operations below it are counted.
        has_links: Whether its file system has hard links.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        folder: Path,
        log: Path,
        *,
        fault: Fault | None = None,
        has_links: bool = True,
        ranks: int = 1,
    ) -> None:
        words = [str(a) for a in arguments]
        launched = words if ranks == 1 else ["launch", "--cpus", str(ranks), *words[1:]]
        self.line = f"ssdctl {shlex.join(launched)}"
        self._last_step = words[words.index("--steps") + 1] if "--steps" in words else ""
        faults: list[Fault | None] = [None] * ranks
        if fault is not None:
            rank = min(fault.rank, ranks - 1)
            faults[rank] = fault
            self.line += (
                f"   # {fault.name} at file operation {fault.at} of rank {rank} in {folder}"
            )
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())} if ranks > 1 else {}
        self._logs = [log.with_suffix(f".{rank}") for rank in range(ranks)]
        self._own_logs = folder / "logs"  # of the ranks, once their run has one
        self._processes = []
        for rank, fault in enumerate(faults):
            if ranks > 1:
                group |= {"WORLD_SIZE": str(ranks), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            hook = _Hook(str(folder), fault, has_links)
            given = (words, self._logs[rank], hook, dict(group))
            self._processes.append(CONTEXT.Process(target=_run, args=given, daemon=True))
        for process in self._processes:
            process.start()

    def wait(self) -> tuple[int, str]:
        """Return the code of the rank that failed first, or 0, and what all wrote."""
        end = time.monotonic() + DEADLINE_S
        codes: list[int | None] = []
        while alive := [p for p in self._processes if p.exitcode is None]:
            failed = [p.exitcode for p in self._processes if p.exitcode]
            if failed and not connection.wait([p.sentinel for p in alive], GRACE_S):
                codes = failed  # a launcher ends the others, which wait for it
                [process.terminate() for process in alive]
            if not connection.wait([p.sentinel for p in alive], end - time.monotonic()):
                break
        codes = codes or [process.exitcode for process in self._processes]
        [process.kill() for process in self._processes]
        text = "".join(p.read_text(errors="replace") for p in self._logs if p.exists())
        code = -9 if -9 in codes else codes[0]
        assert code is not None, f"hangs: {self.line}: {text}"
        of_others = {code, 8} if code == -9 else {code}
        if code == -9 and f"step {self._last_step} " in text:  # at its end the others are done
            of_others.add(0)
        is_alike = of_others.issuperset(codes)
        assert is_alike, f"{codes}: {self.line}: {text}{self._others()}"
        return code, text

    def _others(self) -> str:
        """Return what the ranks after the first wrote into the run folder."""
        logs = sorted(self._own_logs.glob("rank-[1-9]*.log"))
        return "".join(path.read_text(errors="replace")[-2000:] for path in logs)


class _Hook:
    def __init__(self, folder: str, fault: Fault | None, has_links: bool) -> None:
        self._folder, self._fault, self._has_links = folder, fault, has_links
        self._count = 0
        self._found: list[tuple[str, int, int]] | None = None
        self._counts_changes = fault is not None and fault.name == "SIGKILL"

    def install(self) -> None:
        lock = threading.Lock()

        def hook(event: str, given: tuple[Any, ...]) -> None:
            if event != "open" and event not in CHANGING:
                return
            if not any(str(path).startswith(self._folder) for path in given[:2]):
                return
            with lock:
                count = self._count = self._count + self._is_counted()
            if event == "os.link" and not self._has_links:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            if self._fault is not None:
                needs_space = event in CREATING or (event == "open" and given[2] & os.O_ACCMODE)
                self._fail(self._fault, count, bool(needs_space), str(given[0]))

        sys.addaudithook(hook)
        rename = os.replace  # what is in buffers at its end is lost, too
        os.replace = lambda *given: rename(*given) or sys.audit(RENAMED, *given)

    def _is_counted(self) -> bool:
        if not self._counts_changes:
            return True
        found = []
        for folder, _, names in os.walk(self._folder):
            for name in names if not folder.endswith("/logs") else ():
                with contextlib.suppress(OSError):
                    status = os.lstat(f"{folder}/{name}")
                    found.append((f"{folder}/{name}", status.st_ino, status.st_size))
        is_changed, self._found = found != self._found, found
        return is_changed

    @staticmethod
    def _fail(fault: Fault, count: int, needs_space: bool, path: str) -> None:
        if fault.is_signal:
            if count == fault.at:
                os.kill(os.getpid(), getattr(signal, fault.name))
        elif count >= fault.at and needs_space:
            number = getattr(errno, fault.name)
            raise OSError(number, os.strerror(number), path)


def score_in_this_process() -> None:
    """Evaluate without a process of its own, which would import for a second.

    Every step has an AP of its own: so short a training finds nothing.
    """
    from ssdctl.evaluation.analysis import BackgroundScoring, score

    def run(scoring: Any) -> Any:
        found = score(*scoring._job)
        ap = (found.about.step or 0) * 7 % 11 / 20
        return msgspec.structs.replace(found, metrics={**found.metrics, "AP": ap})

    BackgroundScoring._run = run  # type: ignore[method-assign]


def _run(words: list[str], log: Path, hook: _Hook, variables: dict[str, str]) -> None:
    from ssdctl.cli.main import main

    score_in_this_process()
    os.environ.update(variables, OMP_NUM_THREADS="1")
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(target, 1)
    os.dup2(target, 2)
    sys.stdout, sys.stderr = (open(n, "w", buffering=1, closefd=False) for n in (1, 2))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hook.install()
    main(words)
