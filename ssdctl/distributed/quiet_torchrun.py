"""torchrun without its traceback and its log lines: `python -m ssdctl.distributed.quiet_torchrun`
for `python -m torch.distributed.run`.

The failed rank has printed its error, and `ssdctl launch` names the rank; torchrun would repeat it
in thirty lines at the end, where the user looks first. Its own errors are still printed.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> None:
    """Run torchrun's command line; exit 1 if a rank failed, 128 + N after signal N."""
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    # `ssdctl launch` reports signals itself. Each module has its own level.
    logging.getLogger("torch.distributed.elastic.agent.server.api").setLevel(logging.ERROR)
    try:
        main()
    except ChildFailedError:
        sys.exit(1)
    except SignalException as error:
        sys.exit(128 + error.sigval)


if __name__ == "__main__":
    run()
