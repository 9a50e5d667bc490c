"""End a run at a target AP or without improvement (--target-ap, --patience). Torch-free."""

from __future__ import annotations


class EarlyStopping:
    """Tracks the best AP of a run. A negative AP is not defined (COCO's -1) and does not count.

    Args:
        ap: The best AP of earlier starts; None if there was none.
        target: End the run at this AP.
        patience: End the run after this many evaluations without a better AP.
    """

    def __init__(self, ap: float | None, target: float | None, patience: int | None) -> None:
        self.ap = None if ap is not None and ap < 0 else ap
        self._target = target
        self._patience = patience
        self._without_improvement = 0

    def update(self, ap: float) -> bool:
        """Record an evaluation; return whether it is the best."""
        if ap < 0:
            return False
        if self.ap is not None and ap <= self.ap:
            self._without_improvement += 1
            return False
        self.ap = ap
        self._without_improvement = 0
        return True

    def reason_to_end(self) -> str | None:
        """Return why the run ends, as a message; None if it continues."""
        if self._target is not None and self.ap is not None and self.ap >= self._target:
            return f"AP {self.ap:.3f} reached --target-ap {self._target:g}"
        if self._patience is not None and self._without_improvement >= self._patience:
            return f"no better AP in {self._without_improvement} evaluations (--patience)"
        return None
