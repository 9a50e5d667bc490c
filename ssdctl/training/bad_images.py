"""Count the images that could not be decoded, over all ranks, up to a limit.

Each rank's loader replaces its own (ssdctl.input.loader). At the log points the ranks exchange
them, so that all ranks end with the same error at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ssdctl.distributed import collectives
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import DataError
from ssdctl.input.batch import BadImage, Batch

MIN_LIMIT = 10
LIMIT_FRACTION = 0.01  # of the images


class BadImages:
    """Collects the bad images of this process's run.

    Args:
        num_images: Number of training images.
    """

    def __init__(self, num_images: int) -> None:
        self.limit = max(MIN_LIMIT, int(LIMIT_FRACTION * num_images))
        self._new: dict[int, BadImage] = {}
        self._reported: set[int] = set()  # of all ranks

    def watch(self, batches: Sequence[Batch]) -> None:
        """Record the replaced images of a step's batches on this rank."""
        for batch in batches:
            for bad in batch.bad:
                if bad.image_id not in self._reported:
                    self._new.setdefault(bad.image_id, bad)

    def collect(self, ranks: Ranks) -> list[BadImage]:
        """Return the new bad images of all ranks since the last call, each image once per run."""
        if not collectives.any_rank([bool(self._new)], ranks)[0]:
            return []
        shares = collectives.broadcast(
            collectives.gather_to_first(list(self._new.values()), ranks), ranks
        )
        collected = {bad.image_id: bad for share in shares for bad in share}
        self._new.clear()
        self._reported.update(collected)
        return sorted(collected.values(), key=lambda bad: bad.sample)

    def refuse_too_many(self) -> None:
        """End the run if there are more than the limit; all ranks decide alike.

        Raises:
            DataError: There are too many to trust the data.
        """
        if len(self._reported) > self.limit:
            raise DataError(
                f"{len(self._reported)} images could not be decoded, the limit is {self.limit}; "
                "the bad_image events in metrics.jsonl name them",
                hint="fix the dataset; ssdctl prepare --force then checks every image",
            )
