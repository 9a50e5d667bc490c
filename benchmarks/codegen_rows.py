"""What each change for GPUs saves: launches and GB of the generated step with all but one of them.

    python benchmarks/codegen_rows.py [--backbone resnet34] [--bs 128] [--only NAME]

Each row takes minutes: it runs `codegen.py` in a separate process, after it has undone one change.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import codegen
from torch import nn

from ssdctl.boxes import Matcher
from ssdctl.device import inductor
from ssdctl.input.normalize import Normalize
from ssdctl.model import fused
from ssdctl.model.loss import MultiboxLoss
from ssdctl.model.ssd300 import SSD300


def _without_form(plain: type[nn.Module]) -> None:
    del fused.FORMS["gpu"][plain]


def _without_option(name: str) -> None:
    options = {k: v for k, v in inductor.gpu_options().items() if k != name}
    inductor.gpu_options = lambda: options


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


ROWS: dict[str, Callable[[], None]] = {
    "all": lambda: None,
    "heads as one aligned convolution": lambda: _without_form(SSD300),
    "max-pool backward as a gather": lambda: _replace(inductor, "keep_pool_backward", lambda: None),
    "IoU fused into its reductions": lambda: _without_form(Matcher),
    "cross-entropy by comparison": lambda: _without_form(MultiboxLoss),
    "force_layout_optimization": lambda: _without_option("force_layout_optimization"),
    "stem of four planes": lambda: _replace(fused.AlignedStem, "forward", nn.Conv2d.forward),
    "colors as sums": lambda: _without_form(Normalize),
    "combo_kernels": lambda: _without_option("combo_kernels"),
    "ReLU after a norm as a comparison": lambda: _replace(
        fused.NormReLU, "forward", nn.ReLU.forward
    ),
}


def main() -> None:
    """Print a row for each change, or run one in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="part of the names of the rows")
    parser.add_argument("--row", choices=ROWS, help=argparse.SUPPRESS)
    options, passed_on = parser.parse_known_args()
    if options.row:
        ROWS[options.row]()
        sys.argv = [codegen.__file__, "--json", *passed_on]
        codegen.main()
        return
    print("| without | launches | GB forward | GB backward | atomics | unaligned |")
    print("|---|---|---|---|---|---|")
    for name in ROWS:
        if options.only not in name:
            continue
        command = [sys.executable, __file__, "--row", name, *passed_on]
        counts = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        launches = counts["launches_forward"] + counts["launches_backward"]
        cells = [counts[f"gigabytes_{part}"] for part in ("forward", "backward")]
        cells += [counts["atomics"], counts["unaligned_convolutions"]]
        print(f"| {name} | {launches} | {' | '.join(str(cell) for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()
