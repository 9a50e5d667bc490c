"""What ranks do alike though only one of them has a reason to."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torchvision
from conftest import TINY_RUN, Result
from download.http_server import Server, file
from processes import wait_for

from ssdctl.launch.run import free_port

SCRIPT = """
import json, sys
import tiny_network, torch
from ssdctl.device import open_device
from ssdctl.distributed.collectives import any_rank
from ssdctl.distributed.process_group import process_group
from ssdctl.train.optimizer import build_optimizer
from ssdctl.distributed.ranks import find_ranks
from ssdctl.train.step import TrainStep

ranks, device, settings = find_ranks(), open_device("cpu"), tiny_network.config()
told = []
with process_group(ranks, device, 60):
    torch.manual_seed(0)
    model = device.place(tiny_network.Tiny()).train()
    optimizer = build_optimizer(model, settings, device)
    step = TrainStep(model, optimizer, device, settings, "fp32", ranks)
    for number in range(4):
        is_spoiled = number == 2 and ranks.rank == 1
        batch = tiny_network.batch(seed=10 * number + ranks.rank, jitter=float("inf") if is_spoiled else 1.0)
        result = step([batch], 1e-3)
        weights = [p.detach().double().sum().item() for p in model.parameters()]
        told.append([bool(result.is_bad), weights])
    flags = any_rank([ranks.rank == 1, False], ranks)
print(json.dumps({"steps": told, "agreed": flags}))
"""


WITH_WEIGHTS = """
import sys
from ssdctl.download import sources
from ssdctl.download.sources import PinnedFile, Weights

name, url, digest = sys.argv[1:4]
sources.WEIGHTS = (Weights(PinnedFile(name, url, digest), "tiny-v1", "for tests"),)
from ssdctl.cli.main import main

main(sys.argv[4:])
"""


def two_ranks(script: str, *arguments: object, **variables: str) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of two processes that know each other."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = str(server.getsockname()[1])
    paths = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", **variables}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            env={**os.environ, **common, "RANK": r, "LOCAL_RANK": r, "PYTHONPATH": paths},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in ("0", "1")
    ]
    words = [process.communicate(timeout=120) for process in processes]
    return [(p.returncode, *w) for p, w in zip(processes, words, strict=True)]


def test_a_step_that_is_bad_on_one_rank_is_left_out_on_all() -> None:
    ended = two_ranks(SCRIPT)
    assert [code for code, _, _ in ended] == [0, 0], ended
    first, second = (json.loads(out) for _, out, _ in ended)
    assert first == second
    assert first["agreed"] == [True, False]
    flags = [is_bad for is_bad, _ in first["steps"]]
    weights = [values for _, values in first["steps"]]
    assert flags == [False, False, True, False]
    assert weights[2] == weights[1]  # nothing moved
    assert weights[3] != weights[2]  # and training goes on


def test_a_signal_ends_the_wait_for_a_rank_that_never_comes(tmp_path: Path) -> None:
    """The other one may have been ended by the same signal before it had begun."""
    rank = "1"
    script = (
        "import sys\n"
        "from ssdctl.distributed import rendezvous\n"
        "torch_rendezvous = rendezvous.torch_rendezvous\n"
        "def announced(*arguments):\n"
        "    sys.stderr.write('waiting\\n')\n"
        "    yield from torch_rendezvous(*arguments)\n"
        "rendezvous.torch_rendezvous = announced\n"
        "from ssdctl.cli.main import main\n"
        "main(sys.argv[1:])\n"
    )
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = ["train", "--data", "none", "--out", str(tmp_path / "run"), "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-c", script, *command],
        env={**os.environ, **common, "RANK": rank, "LOCAL_RANK": rank},
        stderr=subprocess.PIPE,
    )
    try:
        log = tmp_path / "run" / "logs" / f"rank-{rank}.log"
        wait_for(lambda: log.exists() and "waiting" in log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 75
    finally:
        process.kill()
        process.communicate()


def test_one_rank_fetches_the_weights_for_all(shapes: Path, tmp_path: Path) -> None:
    content = io.BytesIO()
    torch.save(torchvision.models.resnet18().state_dict(), content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    name = f"tiny-{digest[:8]}.pth"
    options = [*TINY_RUN.split(), "--backbone-weights", "tiny-v1", "--steps", "1"]
    with Server() as server:
        url = server.route(f"/{name}", file(content.getvalue()))
        given = [name, url, digest, "train", "--data", shapes, "--out", tmp_path / "run", *options]
        ended = two_ranks(WITH_WEIGHTS, *given, TORCH_HOME=str(tmp_path / "torch"))
    assert [code for code, _, _ in ended] == [0, 0], ended
    assert server.body_bytes < 1.05 * len(content.getvalue())
    assert sum(err.count("backbone weights") for _, _, err in ended) == 1  # one voice


def test_a_rank_that_cannot_evaluate_ends_all_with_its_code(
    cli: Callable[..., Result], shapes: Path, tmp_path: Path
) -> None:
    """Of nine validation images the second is rank 1's."""
    data = tmp_path / "shapes"
    shutil.copytree(shapes, data)
    assert cli("prepare", "--data", data, "--no-pack").code == 0
    image = sorted((data / "val2017").iterdir())[1]
    kept = image.stat()
    image.write_bytes(b"\xff\xd8" + bytes(kept.st_size - 2))
    os.utime(image, ns=(kept.st_atime_ns, kept.st_mtime_ns))  # training takes it for unchanged
    command = [sys.executable, "-m", "ssdctl", "launch", "--cpus", "2", "--data", str(data)]
    options = ["--out", str(tmp_path / "run"), "--steps", "2", *TINY_RUN.split()]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 3, done.stderr
    assert image.name in done.stderr
    assert "lost rank" not in done.stderr
    assert "Traceback" not in done.stderr  # torchrun's own
    assert done.stderr.index("image") < done.stderr.index("failed first, with exit code 3")
