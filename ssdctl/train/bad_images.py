"""Images that could not be trained on: counted over all ranks, told once each, up to a cap.

The loaders replace them (ssdctl.input.loader), each rank its own; at the log points the ranks put
together what they met, so that all of them end with the same error at the same step.
"""

from __future__ import annotations

from collections.abc import Sequence

from ssdctl.distributed import collectives
from ssdctl.distributed.ranks import Ranks
from ssdctl.errors import DataError
from ssdctl.input.loader import BadImage, Batch

LEAST_CAP = 10
CAP_SHARE = 0.01  # of the images


class BadImages:
    """The bad images of this process's run.

    Args:
        num_images: Images that are trained on.
    """

    def __init__(self, num_images: int) -> None:
        self.cap = max(LEAST_CAP, int(CAP_SHARE * num_images))
        self._new: dict[int, BadImage] = {}
        self._known: set[int] = set()  # of all ranks

    def watch(self, batches: Sequence[Batch]) -> None:
        """Note what was replaced in a step's batches of this rank."""
        for batch in batches:
            for bad in batch.bad:
                if bad.image_id not in self._known:
                    self._new.setdefault(bad.image_id, bad)

    def collect(self, ranks: Ranks) -> list[BadImage]:
        """What all ranks met since the last time, each image once in the run."""
        if not collectives.any_rank([bool(self._new)], ranks)[0]:
            return []
        shares = collectives.broadcast(
            collectives.gather_to_first(list(self._new.values()), ranks), ranks
        )
        found = {bad.image_id: bad for share in shares for bad in share}
        self._new.clear()
        self._known.update(found)
        return sorted(found.values(), key=lambda bad: bad.sample)

    def refuse_too_many(self) -> None:
        """End the run where the cap is passed; all ranks decide alike.

        Raises:
            DataError: So many that the data cannot be trusted.
        """
        if len(self._known) > self.cap:
            raise DataError(
                f"{len(self._known)} images could not be trained on, more than {self.cap}; "
                "they are named by the bad_image events in metrics.jsonl",
                hint="mend the dataset, then ssdctl prepare --force checks every image",
            )
