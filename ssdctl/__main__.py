"""Where the program starts: `ssdctl`, or `python -m ssdctl` as launchers have it.

The signal handlers of a run go in before anything else is imported: the imports take a second or
two, and a signal may come at any moment. Other commands end silently by Ctrl-C until they run.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def own_exit_code() -> Iterator[None]:
    """Keep the exit code of the block if stdout or stderr cannot be written.

    Python flushes both again when it exits, and exits with 120 if that fails.
    """
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # a full disk; a closed stream
                with contextlib.suppress(OSError, ValueError):
                    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@own_exit_code()
def run() -> None:
    """Run the command line, or tell a shell what may come next on it."""
    is_training = "train" in sys.argv[1:2]
    if os.getpid() == 1 and not is_training:
        # The first process of a container ignores what it has no handler for: it would hold its
        # device until it is killed. Commands with handlers of their own put them in its place.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    can_be_interrupted = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if can_be_interrupted:  # not below nohup
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ssdctl.cli import shell_completion
    from ssdctl.launch.exit_codes import recorded_exit
    from ssdctl.runtime import signals

    if shell_completion.is_asked():
        raise SystemExit(shell_completion.answer())
    if is_training:
        signals.install()
    with recorded_exit():
        from ssdctl.cli.main import main

        if can_be_interrupted and not is_training:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main()


if __name__ == "__main__":
    run()
