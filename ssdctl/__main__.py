"""Where the program starts: `ssdctl`, or `python -m ssdctl` as launchers have it.

The signal handlers of a run go in before anything else is imported: the imports take a second or
two, and a signal may come at any moment.
"""

from __future__ import annotations

import sys

from ssdctl.launch.exits import recorded_exit
from ssdctl.train import signals


def run() -> None:
    """Run the command line."""
    if "train" in sys.argv[1:2]:
        signals.install()
    with recorded_exit():
        from ssdctl.cli.main import main

        main()


if __name__ == "__main__":
    run()
