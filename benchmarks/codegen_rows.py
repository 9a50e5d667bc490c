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
import torch
from torch import Tensor, nn

from ssdctl.boxes import matcher
from ssdctl.device import inductor
from ssdctl.model import loss, normalize, resnet, ssd300


def _with_separate_heads() -> None:
    def separate(feature: Tensor, box_head: nn.Module, class_head: nn.Module) -> Any:
        return box_head(feature), class_head(feature)

    ssd300.joined_heads = separate


def _with_iou_tables() -> None:
    def match(*arguments: Any, fused: bool, **options: Any) -> Any:
        return matcher.match(*arguments, fused=False, **options)

    loss.match = match  # type: ignore[attr-defined]  # imported there, not exported


def _with_custom_cross_entropy() -> None:
    loss._cross_entropy = loss._CrossEntropy.apply


def _with_color_products() -> None:
    def as_product(
        module: normalize.Normalize, images_BHW3: Tensor, jitter_B4: Tensor, **_: Any
    ) -> Tensor:
        pixels = images_BHW3.to(jitter_B4.dtype) / 255
        matrix_B33, offset_B3 = module._map(jitter_B4, pixels.mean(dim=(1, 2)))
        flat = torch.baddbmm(offset_B3[:, None], pixels.flatten(1, 2), matrix_B33.transpose(1, 2))
        return flat.reshape(pixels.shape).permute(0, 3, 1, 2)

    # mypy refuses assignments to methods: this one undoes the change.
    normalize.Normalize.as_fused_sums = as_product  # type: ignore[method-assign]


def _without_option(name: str) -> None:
    options = {k: v for k, v in inductor.gpu_options().items() if k != name}
    inductor.gpu_options = lambda: options


def _replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


ROWS: dict[str, Callable[[], None]] = {
    "all": lambda: None,
    "heads as one aligned convolution": _with_separate_heads,
    "max-pool backward as a gather": lambda: _replace(inductor, "keep_pool_backward", lambda: None),
    "IoU fused into its reductions": _with_iou_tables,
    "cross-entropy by comparison": _with_custom_cross_entropy,
    "force_layout_optimization": lambda: _without_option("force_layout_optimization"),
    "stem of four planes": lambda: _replace(resnet.StemConv, "forward", nn.Conv2d.forward),
    "colors as sums": _with_color_products,
    "combo_kernels": lambda: _without_option("combo_kernels"),
    "ReLU after a norm as a comparison": lambda: _replace(
        resnet.NormReLU, "forward", nn.ReLU.forward
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
