"""What the operating system grants (CPUs, limits, memory, cache folders), threads, and the settings
that the commands make for their process.

Only Linux is tested. CPU affinity and /proc are absent on macOS: there the functions return that
the answer is unknown. `ssdctl.load` makes no settings: they are the user's program's.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import resource
import stat
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Generic, TypeVar

from ssdctl.errors import UsageError

T = TypeVar("T")
R = TypeVar("R")

SYS = Path("/sys")
PROC = Path("/proc")
SYSFS = Path("/sys/devices/system/cpu")
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 and Arm, in /proc/cpuinfo
UNLIMITED = resource.RLIM_INFINITY  # a limit that is not set
RESERVED_FILES = 512  # open files besides the store
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
# Before a waiting thread sleeps; libgomp's default is 300,000.
SPINS, FEW_SPINS = 10_000, 1_000
# In errors of torch, of oneDNN, of C++, of the kernel and of the dynamic linker.
MEMORY_ERRORS = (
    "can't allocate memory", "could not create a memory object", "bad_alloc",
    "cannot allocate memory", "failed to map segment", "could not create a primitive",
)  # fmt: skip
BUSY = 2.0  # runnable processes per core of the machine


def usable_cpus() -> Collection[int]:
    """Return the numbers of the CPUs that this process may use; all, if it cannot be restricted."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


def usable_cores(world_size: int = 1) -> int:
    """Return how many threads of this process can run at the same time.

    That is its affinity mask and its CPU quota, rounded up, shared with the ranks of the node.
    """
    cores, quota = len(usable_cpus()), cpu_quota()
    if quota is not None:
        cores = min(cores, math.ceil(quota))
    if world_size > 1:
        cores //= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # The cores that Slurm gave to a task; not every site binds the task to them.
        cores = min(cores, int(os.environ.get("SLURM_CPUS_PER_TASK", cores)))
    return max(cores, 1)


def quota_cores() -> int | None:
    """Return this process's CPU quota, rounded up; None if it has no more physical cores.

    Libraries start a thread for each physical core of the affinity mask; they ignore the quota.
    """
    if (quota := cpu_quota()) is None:
        return None
    cores = math.ceil(quota)
    return cores if cores < len(physical_cores(usable_cpus())[0]) else None


def physical_cores(cpus: Collection[int], sysfs: Path = SYSFS) -> tuple[set[tuple[int, int]], bool]:
    """Return socket and number of the cores of some CPUs, and whether the topology is known."""
    cores, has_topology = set(), True
    for cpu in cpus:
        topology = sysfs / f"cpu{cpu}" / "topology"
        try:
            socket = int((topology / "physical_package_id").read_text())
            cores.add((socket, int((topology / "core_id").read_text())))
        except (OSError, ValueError):  # a VM without topology: each CPU is a core of one socket
            cores.add((0, cpu))
            has_topology = False
    return cores, has_topology


def cpu_quota(proc: Path = PROC, sys: Path = SYS) -> float | None:
    """Return how many cores' time the cgroups of this process grant; None means all."""
    quotas = []
    for folder in _cgroups("cpu", proc, sys):
        # Version 2 has "200000 100000", or "max 100000"; version 1 a file for each number.
        names = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
        numbers = [n for name in names for n in read_text(folder / name).split()]
        if len(numbers) == 2 and all(n.isdigit() and int(n) for n in numbers):  # not -1, max
            quotas.append(int(numbers[0]) / int(numbers[1]))
    return min(quotas, default=None)


def memory_limit(proc: Path = PROC, sys: Path = SYS) -> int | None:
    """Return the bytes of memory that the cgroups of this process grant; None means all."""
    names = ("memory.max", "memory.limit_in_bytes")  # versions 2 and 1
    texts = [read_text(folder / name) for folder in _cgroups("memory", proc, sys) for name in names]
    return min((int(text) for text in texts if text.isdigit()), default=None)


def memory_kills(proc: Path = PROC, sys: Path = SYS) -> int:
    """Return how many processes of this process's cgroup were killed for their memory so far."""
    for folder in _cgroups("memory", proc, sys):
        for name in ("memory.events", "memory.oom_control"):  # versions 2 and 1
            for line in read_text(folder / name).splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


def _cgroups(controller: str, proc: Path, sys: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its parents."""
    mount = sys / "fs/cgroup"
    for line in read_text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = mount / controller if controllers else mount
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts), -1, -1):
            yield base.joinpath(*parts[:depth])


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files, as far as it may, if `count` more need it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + RESERVED_FILES
    if soft == UNLIMITED or soft >= needed:
        return
    soft = needed if hard == UNLIMITED else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def read_text(path: Path) -> str:
    """Return the stripped text of a kernel file; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def read_table(path: Path) -> dict[str, str]:
    """Return a kernel table of `name: value` lines; the first value of a name counts."""
    table: dict[str, str] = {}
    for line in read_text(path).splitlines():
        name, _, value = line.partition(":")
        table.setdefault(name.strip(), value.strip())
    return table


def processor() -> tuple[str, bool]:
    """Return the name of the processor, empty if it is unknown, and whether it computes in bf16."""
    facts = read_table(Path("/proc/cpuinfo"))
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return facts.get("model name", platform.processor()), not BF16_FLAGS.isdisjoint(flags)


def table_bytes(table: Mapping[str, str], name: str) -> int:
    """Return an amount of a kernel table, which is in kB, in bytes; 0 if it is not listed."""
    return int(table.get(name, "0").split()[0]) * 1024


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def memory_error(error: BaseException | None) -> UsageError | None:
    """Return the error for one that says that this process can get no more memory, else None."""
    while error is not None:
        text = str(error)
        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        # Python's C code loses some MemoryErrors: "error return without exception set".
        is_lost = isinstance(error, SystemError) and "without" in text and soft != UNLIMITED
        if (
            is_lost
            or isinstance(error, MemoryError)
            or any(t in text.lower() for t in MEMORY_ERRORS)
        ):
            hint = "request more memory, or use less: a smaller --bs, fewer --workers"
            if soft != UNLIMITED:
                hint = f"raise the limit of {soft / 1e9:.1f} GB (ulimit -v), or {hint}"
            return UsageError(f"memory ran out: {text or 'of Python objects'}", hint=hint)
        if "can't start new thread" in text:
            hint = (
                "raise the limit of processes (ulimit -u, a container's pids) or memory (ulimit -v)"
            )
            return UsageError("no further thread can be started", hint=hint)
        error = error.__cause__ or error.__context__
    return None


def is_process_running(process: int) -> bool:
    """Return whether this machine has a process with this id."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def expand_home(path: str) -> Path | None:
    """Return the path with `~` replaced; None for an id without a home, as in some containers."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return None


def home_folders() -> list[Path]:
    """Return the home folder as it is written and without links; empty if there is none, or `/`."""
    home = expand_home("~")
    folders = [] if home is None else [home, home.resolve()]
    return [folder for folder in folders if folder != Path("/")]


def user_temporary_dir() -> Path:
    """Return `$TMPDIR/ssdctl-UID` (or in /tmp); it need not exist, and may be another user's."""
    return Path(os.environ.get("TMPDIR") or "/tmp", f"ssdctl-{os.getuid()}")


def private_cache_dir(name: str) -> Path | None:
    """Return the folder NAME in `user_temporary_dir`, created for this user only.

    None if another user owns that path, if it is a symbolic link, or if others may write to it:
    anybody may create names in a shared temporary folder.
    """
    root = user_temporary_dir()
    try:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        status = root.lstat()
        is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
        if not is_own or status.st_mode & 0o077:
            return None
        folder = root / name
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder


def limit_threads() -> None:
    """Limit torch's threads to the CPU quota; call it before torch is loaded.

    Threads beyond the quota are throttled together, often while one of them holds a lock.
    """
    quota = quota_cores()
    if quota is not None and not any(name in os.environ for name in THREADS):
        os.environ["OMP_NUM_THREADS"] = str(quota)


def shorten_waiting() -> None:
    """Let libgomp's threads sleep sooner while they wait; call it before torch is loaded.

    By default a thread spins for milliseconds after each operation until the others are done. On a
    busy machine those are not running: sleeping sooner made training 2 to 5 times as fast. The
    shortest time makes an idle machine some percent slower, so only one that is busy at the start
    gets it (benchmarks/RESULTS.md, "A busy machine"). Results do not change.
    """
    if any(name in os.environ for name in WAITING):
        return
    is_busy = os.getloadavg()[0] > BUSY * (os.cpu_count() or 1)
    os.environ["GOMP_SPINCOUNT"] = str(FEW_SPINS if is_busy else SPINS)


class Overridden(Generic[T]):
    """A setting of the whole process that blocks override; the last block restores it.

    Blocks may overlap in any order, as those of two trainers, or of threads. A value that others
    set meanwhile is kept.

    Args:
        read: Returns the value.
        write: Sets it.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], object]) -> None:
        self._read, self._write = read, write
        self._lock = threading.Lock()
        self._values: dict[object, T] = {}  # of the open blocks, in order
        self._before: list[T] = []

    @contextlib.contextmanager
    def by(self, value: T) -> Iterator[None]:
        block = object()
        with self._lock:
            if not self._values:
                self._before = [self._read()]
            self._values[block] = value
            self._write(value)
            self._written = self._read()
        try:
            yield
        finally:
            with self._lock:
                del self._values[block]
                if self._read() == self._written:
                    self._write([*self._before, *self._values.values()][-1])
                    self._written = self._read()


@functools.cache
def variable(name: str) -> Overridden[str | None]:
    """Return an environment variable; None is one that is not set."""

    def write(value: str | None) -> None:
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

    return Overridden(lambda: os.environ.get(name), write)


@contextlib.contextmanager
def with_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the duration of the block."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            stack.enter_context(variable(name).by(value))
        yield


@contextlib.contextmanager
def with_defaults(defaults: Mapping[str, str]) -> Iterator[None]:
    """Set those of the environment variables that are not set, for the duration of the block."""
    with with_variables({name: os.environ.get(name, value) for name, value in defaults.items()}):
        yield


def tune_process() -> None:
    """Keep freed memory; switch threads sooner than after 5 ms, in which an image is decoded."""
    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Let malloc keep freed memory, process-wide; return whether it does (glibc only).

    By default glibc returns the memory of large tensors to the system, and the next step causes a
    page fault for each 4 KB of it. The peak of training grows by some percent, that of scoring
    with hundreds of classes by half or more (benchmarks/RESULTS.md).
    """
    if any(name in environment for name in USER_SETTINGS):
        return False
    import ctypes  # late: every command imports this file

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another libc
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, NEVER), (M_TOP_PAD, STEP_BYTES))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in settings)


def run_in_daemon_thread(work: Callable[[], T]) -> Future[T]:
    """Run a function in a daemon thread and return its future.

    The thread does not block interpreter exit, even if it hangs (a dead file system).
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def map_ahead(
    pool: Executor, function: Callable[[T], R], items: Iterable[T], ahead: int
) -> Iterator[R]:
    """Yield `function(item)` for each item in order; up to `ahead` more calls are under way.

    If a call fails, its exception is raised when its result is yielded. Items are taken only as far
    as needed, so they may be endless.
    """
    futures = (pool.submit(function, item) for item in items)
    return (future.result() for future in take_ahead(futures, ahead))


def take_ahead(items: Iterable[T], ahead: int) -> Iterator[T]:
    """Yield items in order; `ahead` more items are taken before each is yielded.

    If taking an item fails, its exception is raised after the items before it.
    """
    taken: deque[T] = deque()
    try:
        for item in items:
            taken.append(item)
            if len(taken) > ahead:
                yield taken.popleft()
    except Exception:
        yield from taken
        raise
    yield from taken


def take_batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size` items, the last of them shorter; exceptions as `take_ahead`."""
    batch: list[T] = []
    try:
        for item in items:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
    except Exception:
        if batch:
            yield batch
        raise
    if batch:
        yield batch


ABANDONED = threading.Event()  # the process must end without waiting for its threads


@contextlib.contextmanager
def thread_pool(threads: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool whose tasks end with the block; Ctrl-C does not wait for a stalled file system.

    What has not begun is canceled at an error.
    """
    pool, waits = ThreadPoolExecutor(threads, thread_name_prefix=name), True
    try:
        yield pool
    except KeyboardInterrupt:
        waits = False
        ABANDONED.set()
        raise
    finally:
        pool.shutdown(wait=waits, cancel_futures=True)


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[int]:
    """Redirect stdout, also of C++ and of child processes; yield a descriptor of the former one."""
    import ctypes  # late: few commands need it

    def flush() -> None:
        sys.stdout.flush()
        ctypes.CDLL(None).fflush(None)

    flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield kept
    finally:
        flush()
        os.dup2(kept, 1)
        os.close(kept)
