"""What limits a run on 8, 64 and 512 cards, computed from measured pieces and published links.

    python benchmarks/scale.py

SSD300 with ResNet-34 on COCO, bf16, the MLPerf recipe (65 epochs, 11 evaluations). `measured` and
`published` say where a number comes from; `assumed` numbers are to be replaced by the first
measurement. The table is Markdown; docs/performance.md has a copy.
"""

from __future__ import annotations

from typing import NamedTuple

COCO_IMAGES, VAL_IMAGES = 117_266, 5_000
EPOCHS, EVALUATIONS = 65, 11
GLOBAL_BATCH = 4_096  # assumed: the most images of a step that still converge
LARGEST_BATCH = 128  # images per card

# Measured on two CPU cores (benchmarks/RESULTS.md).
TRAIN_GFLOP = 94.7  # an image, forward and backward; counted from the shapes
PARAMETERS = 19.97e6  # counted
DECODE_MS = {"packed": 3.33, "raw": 0.84}  # core ms an image: read, crop, decode, resize
EVALUATE_MS = 3.33 + 3.0  # core ms an image: decode and NMS
SCORE_S = 0.45  # 554,000 detections
# Assumed.
STEP_MS = 1.0  # of a step, whatever its batch: launches, the optimizer's last kernels
LATENCY_US = 5.0  # a hop of the ring between hosts
DISK_GBS = 1.0  # to the file system of the run folder
STARTUP_S = 60.0  # imports, weights, index, compiler


class Card(NamedTuple):
    """An accelerator in its usual host: published figures, and the assumed fraction of the peak."""

    name: str
    tflops: float  # bf16, dense
    fraction: float
    per_host: int
    cores: int  # physical, of a host
    inside_gbs: float  # gigabytes a second of a card to the others of its host, one direction
    outside_gbs: float  # to other hosts


CARDS = (
    # DGX H100 data sheet: NVLink 900 GB/s in both directions, a 400 Gb/s adapter per GPU.
    Card("H100", 989, 0.40, 8, 112, 450, 50),
    # Intel, "Gaudi network configuration": 21 and 3 ports of 100 Gb/s.
    Card("Gaudi 2", 432, 0.40, 8, 80, 262.5, 37.5),
    # Google Cloud, "TPU v5e": links of 1,600 Gb/s a chip within a pod of 256, 8 chips a host.
    Card("TPU v5e", 197, 0.40, 8, 112, 100, 100),
)


def ring_s(num_bytes: float, ranks: int, gbs: float) -> float:
    """Return the seconds of a ring all-reduce."""
    hops = 2 * (ranks - 1)
    return hops / ranks * num_bytes / (gbs * 1e9) + hops * LATENCY_US * 1e-6 if ranks > 1 else 0


def exchange_s(card: Card, cards: int) -> float:
    """Return the seconds to sum the fp32 gradients: inside each host, then shards between hosts."""
    hosts = max(cards // card.per_host, 1)
    size = 4 * PARAMETERS
    return ring_s(size, min(cards, card.per_host), card.inside_gbs) + ring_s(
        size / card.per_host, hosts, card.outside_gbs
    )


def row(card: Card, cards: int) -> str:
    batch = min(LARGEST_BATCH, GLOBAL_BATCH // cards)
    compute_s = batch * TRAIN_GFLOP / (1e3 * card.tflops * card.fraction) + STEP_MS / 1e3
    exchange = exchange_s(card, cards)
    cores = card.cores / card.per_host
    input_s = {name: batch * ms / 1e3 / cores for name, ms in DECODE_MS.items()}
    # The exchange overlaps with the backward pass, two thirds of the computation.
    hidden = max(exchange - compute_s * 2 / 3, 0)
    parts = {"compute": compute_s + hidden, **{f"input, {k}": s for k, s in input_s.items()}}
    step = max(compute_s + hidden, input_s["raw"])
    epoch = COCO_IMAGES / (batch * cards) * step
    forward = TRAIN_GFLOP / 3 / (1e3 * card.tflops * card.fraction)
    evaluation = VAL_IMAGES / cards * max(forward, EVALUATE_MS / 1e3 / cores) + SCORE_S
    checkpoint = 3 * 4 * PARAMETERS / (DISK_GBS * 1e9)
    training = EPOCHS * epoch
    total = training + EVALUATIONS * evaluation + STARTUP_S
    limit = max(parts, key=lambda name: parts[name])
    inputs = " / ".join(f"{1e3 * seconds:.1f}" for seconds in input_s.values())
    cells = (
        card.name, f"{cards}", f"{batch}", f"{1e3 * compute_s:.1f}", f"{1e3 * exchange:.1f}",
        inputs, f"{batch * cards / step:,.0f}",
        f"{epoch:.1f}", f"{evaluation:.1f}", f"{checkpoint:.1f}", f"{total / 60:.1f}",
        f"{training / total:.0%}", limit,
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def main() -> None:
    heads = (
        "card", "cards", "batch", "compute, ms", "exchange, ms", "input, ms, packed / raw", "img/s",
        "epoch, s", "evaluation, s", "checkpoint, s", "run, min", "of it training", "longest part",
    )  # fmt: skip
    print(f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for card in CARDS:
        for cards in (8, 64, 512):
            print(row(card, cards))


if __name__ == "__main__":
    main()
