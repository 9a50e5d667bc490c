"""How good a run has been, and whether it may end (--target-ap, --patience). Torch-free."""

from __future__ import annotations


class EarlyStopping:
    """The best AP of a run.

    Args:
        ap: The best of earlier starts, None where there was no evaluation.
        target: End the run at this AP.
        patience: End the run after so many evaluations without a better one.
    """

    def __init__(self, ap: float | None, target: float | None, patience: int | None) -> None:
        self.ap = ap
        self._target = target
        self._patience = patience
        self._without_gain = 0

    def update(self, ap: float) -> bool:
        """Note an evaluation; whether it is the best."""
        if self.ap is not None and ap <= self.ap:
            self._without_gain += 1
            return False
        self.ap = ap
        self._without_gain = 0
        return True

    def reason_to_end(self) -> str | None:
        """Why the run is over, for people; None where it is not."""
        if self._target is not None and self.ap is not None and self.ap >= self._target:
            return f"AP {self.ap:.3f} has reached --target-ap {self._target:g}"
        if self._patience is not None and self._without_gain >= self._patience:
            return f"no better AP in {self._without_gain} evaluations (--patience)"
        return None
