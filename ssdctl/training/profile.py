"""`--profile FIRST,LAST`: a Chrome trace of some steps, and a table of the slowest.

RUN/profile/trace.json      for chrome://tracing or ui.perfetto.dev
RUN/profile/table.txt       kernels and waits, the slowest first
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from ssdctl.device import Device
from ssdctl.distributed.ranks import Ranks
from ssdctl.files import atomic_write, write_text

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
            self._profiler = torch.profiler.profile(activities=_activities(self._device))
            self._profiler.start()

    def after(self, step: int, *, is_last: bool) -> str | None:
        """Stop after the last step of the range and write the files; return a message if it did."""
        if self._profiler is None or not (step == self._steps[-1] or is_last):
            return None
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
        return f"profile of steps {self._steps[0]} to {step}: {trace}, and table.txt next to it"


def waits(averages: Iterable[Any]) -> list[str]:
    """Return a line for each wait of the loop, in ms.

    The GPU's time of a wait is a separate row of the same name, without host time.
    """
    return [
        f"  {row.key:<40}{row.cpu_time_total / 1000:>12.3f} ms in {row.count}"
        for row in averages
        if row.key.startswith(WAIT) and row.cpu_time_total > 0
    ]


def _activities(device: Device) -> list[torch.profiler.ProfilerActivity]:
    supported = torch.profiler.supported_activities()
    return [a for a in supported if a.name.lower() in {"cpu", device.name}]
