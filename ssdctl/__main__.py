"""Entry point of `ssdctl` and of `python -m ssdctl`, which launchers use.

The signal handlers of commands that train are installed before anything else is imported: the
imports take a second or two, and a signal may arrive at any moment. Until their own code runs,
other commands exit silently on Ctrl-C.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__" and not getattr(sys.flags, "safe_path", False):
    # `python -m` searches the working folder first, which may have a random.py.
    try:  # noqa: SIM105 - contextlib may be in that folder, too
        sys.path[:1] = [path for path in sys.path[:1] if path not in ("", os.getcwd())]  # noqa: PTH109
    except FileNotFoundError:  # it was deleted
        pass

import contextlib
import io
import signal
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def own_exit_code() -> Iterator[None]:
    """Preserve the exit code of the block if stdout or stderr cannot be written.

    Python flushes both again at exit, and exits with 120 if that fails.
    """
    try:
        yield
    except SystemExit as end:
        system = sys.modules.get("ssdctl.runtime.system")
        if system is not None and system.ABANDONED.is_set():  # they may hang in a file system
            _flush()
            os._exit(end.code if isinstance(end.code, int) else 1)
        raise
    finally:
        _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # a full disk; a closed stream
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_missing_streams() -> None:
    """Open the null device as each standard stream that the caller has closed (`>&-`).

    Python has None for it then, and the next file that is opened would get its descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one: `number`
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, "w" if number else "r", encoding="utf-8"))


class _Messages(io.FileIO):
    """The file of stderr, which drops lost messages: a closed terminal must not end a run before it
    is saved.
    """

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):
            return super().write(data) or len(data)
        return len(data)


def ignore_lost_messages() -> None:
    """Drop messages that cannot be written to stderr, also those that libraries print."""
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(_Messages(sys.stderr.fileno(), "w", closefd=False)),
        encoding=sys.stderr.encoding,
        errors=sys.stderr.errors,
        line_buffering=True,
    )


TRAINS = ("train", "launch", "demo")  # commands that a signal stops with exit 75


@own_exit_code()
def run() -> None:
    open_missing_streams()
    ignore_lost_messages()
    # `import torch` would load Gaudi's bridge before ssdctl/device/hpu.py has set its mode.
    os.environ.setdefault("PT_HPU_AUTOLOAD", "0")
    # Large images are refused by name, and odd metadata does not matter.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    # torch.distributed.launch puts --local-rank=N before the command
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    is_training = command in TRAINS
    if os.getpid() == 1 and not is_training:
        # The first process of a container ignores signals without a handler: it would hold its
        # device until it is killed.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    can_be_interrupted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if can_be_interrupted:  # not under nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ssdctl.runtime import signals

    if is_training:
        signals.install()
    from ssdctl.distributed.rank_process import recorded_exit
    from ssdctl.errors import ExitCode
    from ssdctl.runtime.system import limit_threads, shorten_waiting

    shorten_waiting()
    if command != "launch":  # its ranks share the quota: they get their own numbers
        limit_threads()
        os.environ.setdefault("PYTHONSAFEPATH", "1")  # of child processes, as above

    with recorded_exit() as exit_now:
        if is_training:
            signals.exit_during_imports(lambda: exit_now(ExitCode.STOPPED))
        from ssdctl.cli.main import main

        if can_be_interrupted and not is_training:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if not is_training:
            signals.interrupt_on_end()
        main()


if __name__ == "__main__":
    run()
