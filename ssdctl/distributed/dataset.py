"""Open a dataset on all ranks; the first one prepares and checks it for the others."""

from __future__ import annotations

from pathlib import Path

from ssdctl.data.open_dataset import open_dataset
from ssdctl.data.store import Split, open_splits
from ssdctl.distributed.process_group import wait_for_main
from ssdctl.distributed.ranks import Ranks
from ssdctl.runtime.progress import Progress


def open_on_all_ranks(
    root: Path, folder: Path, ranks: Ranks, progress: Progress
) -> dict[str, Split]:
    """Return the splits. The other ranks wait for the first one however long it prepares.

    Raises:
        DataError: See `open_dataset`.
    """
    if ranks.is_main:
        splits = open_dataset(root, folder, progress=progress)
    wait_for_main(ranks, f"dataset {root}")
    return splits if ranks.is_main else open_splits(root, folder)
