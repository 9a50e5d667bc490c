"""`ssdctl benchmark train`: consistent metrics, on one rank and on several."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import Cli

from ssdctl.benchmark.train import timed

LINE = "benchmark train --json --fp32 --device cpu --backbone resnet18 --bs 1 --seconds 0.1"
OPTIONS = LINE.split()


@pytest.mark.slow
def test_figures_hang_together(cli: Cli, shapes: Path) -> None:
    metrics = json.loads(cli(*OPTIONS, "--data", shapes).expect(0).out)
    rate = metrics["images_per_second"]
    assert metrics["data"] == "real"
    assert metrics["step_ms"] == pytest.approx(1000 / rate, rel=0.02)
    assert metrics["tflops"] == pytest.approx(
        rate * metrics["gflop_per_image"] / 1000, rel=0.05, abs=1e-4
    )
    assert 0 < metrics["peak_fraction"] < 1
    assert metrics["coco_epoch_hours"] == pytest.approx(117_266 / rate / 3600, rel=0.02)
    assert metrics["input_cost"] == pytest.approx(
        1 - rate / metrics["images_per_second_fake"], abs=0.02
    )
    assert metrics["peak_memory_bytes"] > 1e8


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
