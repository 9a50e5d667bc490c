"""`--profile FIRST,LAST`: a Chrome trace of some steps, and a table of the slowest.

RUN/profile/trace.json      for chrome://tracing or ui.perfetto.dev
RUN/profile/table.txt       kernels and waits, the slowest first
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ssdctl.device import Device
from ssdctl.distributed.ranks import Ranks
from ssdctl.files import atomic_write, write_text

log = logging.getLogger(__name__)

ROWS = 40
WAIT = "wait: "  # prefix of the loop's waits


class StepProfiler:
    """Profiles a range of steps.

    Args:
        steps: `FIRST,LAST` as on the command line, both included; None profiles nothing.
        ranks: Each rank writes its own files; the rank is in the names of all but the first.
    """

    def __init__(self, steps: str | None, folder: Path, device: Device, ranks: Ranks) -> None:
        first, last = (int(part) for part in steps.split(",")) if steps else (0, -1)
        self._steps = range(first, last + 1)
        self._folder = folder
        self._suffix = "" if ranks.is_main else f"-rank{ranks.rank}"
        self._device = device
        self._profiler: torch.profiler.profile | None = None

    def before(self, step: int) -> None:
        if step in self._steps and self._profiler is None:
            self._device.synchronize()  # exclude earlier work
            supported = torch.profiler.supported_activities()
            used = [a for a in supported if a.name.lower() in {"cpu", self._device.name}]
            self._profiler = torch.profiler.profile(activities=used)
            self._profiler.start()

    def after(self, step: int, *, is_last: bool) -> None:
        """Stop after the last step of the range, or of the run, and write the files."""
        if self._profiler is None or not (step == self._steps[-1] or is_last):
            return
        self._device.synchronize()
        self._profiler.stop()
        profiler, self._profiler = self._profiler, None
        trace = self._folder / f"trace{self._suffix}.json"
        with atomic_write(trace) as file:
            profiler.export_chrome_trace(file.name)
        averages = profiler.key_averages()
        on_device = any(row.self_device_time_total for row in averages)
        key = "self_device_time_total" if on_device else "self_cpu_time_total"
        table = averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=70)
        lines = [table, "Waits of the host:", *waits(averages)]
        write_text(self._folder / f"table{self._suffix}.txt", "\n".join(lines) + "\n")
        text = "profile of steps %d to %d: %s, and table.txt next to it"
        log.info(text, self._steps[0], step, trace)


def waits(averages: Iterable[Any]) -> list[str]:
    """Return a line for each wait of the loop, in ms.

    The GPU's time of a wait is a separate row of the same name, without host time.
    """
    return [
        f"  {row.key:<40}{row.cpu_time_total / 1000:>12.3f} ms in {row.count}"
        for row in averages
        if row.key.startswith(WAIT) and row.cpu_time_total > 0
    ]
