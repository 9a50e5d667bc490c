"""torchrun without its traceback: `python -m ssdctl.launch.quiet_torchrun` for
`python -m torch.distributed.run`.

The rank that failed has said why, and `ssdctl launch` names it; torchrun would say the same again
in thirty lines below, where the user looks first. What torchrun itself fails of is still shown.
"""

from __future__ import annotations

import logging
import sys

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def run() -> None:
    """torchrun's command line; exit 1 where a rank failed."""
    logging.getLogger("torch.distributed.elastic.multiprocessing").setLevel(logging.CRITICAL)
    try:
        main()
    except ChildFailedError:
        sys.exit(1)


if __name__ == "__main__":
    run()
