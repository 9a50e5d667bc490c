"""`ssdctl benchmark train`: consistent metrics, on one rank and on several."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

from ssdctl.benchmark.train import timed


class Pair:
    """Two threads that agree; a flag of one that the other does not answer is an error."""

    def __init__(self) -> None:
        self.flags = [False, False]
        self.meeting = threading.Barrier(2, timeout=5)

    def is_any(self, rank: int, flag: bool) -> bool:
        self.flags[rank] = flag
        self.meeting.wait()
        answer = any(self.flags)
        self.meeting.wait()
        return answer

    def run(self, rank: int, work_s: float) -> int:
        times, spent = timed(
            lambda: time.sleep(work_s), 0.2,
            wait=lambda: None, is_any=lambda flag: self.is_any(rank, flag),
        )  # fmt: skip
        assert spent >= times * work_s
        return times


def test_ranks_of_unequal_speed_stop_together() -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(Pair().run, range(2), (0.001, 0.03))
    assert first == second
    assert 1 <= first < 8
