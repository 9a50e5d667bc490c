"""All ranks act alike if only one of them has a reason to act."""

import hashlib
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN
from download.http_server import Server, file
from helpers import last, records, run_ranks, run_script, start_script, wait_for

from ssdctl.distributed import free_port
from ssdctl.model.backbones import find_backbone

COMMAND = "from ssdctl.cli.main import main; import sys; main(sys.argv[1:])\n"
# Both scenarios run in one pair of processes: starting a pair costs more than what they test.
SCENARIOS = """
import json, os, sys
import tiny_network, torch
from ssdctl.device import open_device
from ssdctl.distributed.collectives import FlagExchange, any_rank
from ssdctl.distributed.process_group import process_group
from ssdctl.distributed import find_ranks
from ssdctl.training.step import build_step

ranks, device, settings = find_ranks(), open_device("cpu"), tiny_network.config()
steps = []
with process_group(ranks, device, 60):
    torch.manual_seed(0)
    model = device.place(tiny_network.Tiny()).train()
    step = build_step(model, settings, device, "fp32", ranks)
    for number in range(4):
        is_bad = number == 2 and ranks.rank == 1
        jitter = float("inf") if is_bad else 1.0
        batch = tiny_network.batch(seed=10 * number + ranks.rank, jitter=jitter)
        result = step([batch], 1e-3)
        weights = [p.detach().double().sum().item() for p in model.parameters()]
        steps.append([bool(result.is_bad), weights])
    flags = any_rank([ranks.rank == 1, False], ranks)
    exchange = FlagExchange(ranks)
    later = [
        exchange.exchange([ranks.rank == 1, False]),
        exchange.exchange([False, ranks.rank == 0]),
        exchange.settle([ranks.rank == 1, False]),
        exchange.exchange([False, False]),
    ]
print(json.dumps({"steps": steps, "agreed": flags, "later": later}), flush=True)

from ssdctl.download.pinned_files import PinnedFile
from ssdctl.model.backbones.resnet import tiny

os.environ["MASTER_PORT"], name, url, digest = sys.argv[1:5]
tiny.WEIGHTS["v1"] = PinnedFile(name, url, digest)
from ssdctl.cli.main import main

main(sys.argv[5:])
"""


def test_a_step_that_is_bad_on_one_rank_is_skipped_and_one_rank_downloads_weights_for_all(
    shapes: Path, tmp_path: Path
) -> None:
    content = io.BytesIO()
    torch.save(find_backbone("tiny").build().state_dict(), content)
    digest = hashlib.sha256(content.getvalue()).hexdigest()
    name = f"tiny-{digest[:8]}.pth"
    options = [*TINY_RUN.split(), "--backbone-weights", "tiny-v1", "--steps", "1"]
    with Server() as server:
        url = server.route(f"/{name}", file(content.getvalue()))
        train = ("train", "--data", shapes, "--out", tmp_path / "run", *options)
        torch_home = str(tmp_path / "torch")
        given = (free_port(), name, url, digest)
        ranks = run_ranks(2, SCENARIOS, *given, *train, TORCH_HOME=torch_home)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert server.body_bytes < 1.05 * len(content.getvalue())
    assert sum(rank.err.count("backbone weights") for rank in ranks) == 1

    first, second = (json.loads(rank.out.splitlines()[0]) for rank in ranks)
    assert first == second
    assert first["agreed"] == [True, False]
    assert first["later"] == [
        [False, False],
        [True, False],
        [True, True],  # settled: the previous flags, and these at once
        [False, False],
    ]
    flags = [is_bad for is_bad, _ in first["steps"]]
    weights = [values for _, values in first["steps"]]
    assert flags == [False, False, True, False]
    assert weights[2] == weights[1]  # nothing moved
    assert weights[3] != weights[2]  # and training continues


@pytest.mark.slow
@pytest.mark.parametrize("execution", ["eager", "compile"])
def test_batch_norm_over_two_ranks_trains_as_one_rank_with_the_joined_batch(
    shapes: Path, tmp_path: Path, execution: str
) -> None:
    # A low rate: a high one increases the differences of fp32's rounding with each step.
    options = [*TINY_RUN.split(), "--lr", "2.5e-4", "--data", str(shapes), "--steps", "3"]
    options += ["--execution", execution]
    losses = {}
    for name, ranks, extra in (
        ("joined", 1, ["--bs", "4"]),
        ("synchronized", 2, ["--bs", "2", "--sync-bn"]),
        ("separate", 2, ["--bs", "2"]),
    ):
        command = ["launch", "--cpus", str(ranks), *options, *extra, "--out", str(tmp_path / name)]
        argv = [sys.executable, "-m", "ssdctl", *command]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        losses[name] = [record["loss"] for record in records(tmp_path / name, "train")]
    assert len(losses["joined"]) == 3
    assert losses["synchronized"] == pytest.approx(losses["joined"], rel=1e-5)
    assert losses["separate"] != pytest.approx(losses["joined"], rel=1e-4)


ANNOUNCES_ITS_WAIT = """
import sys
from ssdctl.distributed import process_group

torch_rendezvous = process_group.torch_rendezvous

def announced(*arguments, **options):
    sys.stderr.write("waiting\\n")
    yield from torch_rendezvous(*arguments, **options)

process_group.torch_rendezvous = announced
"""


@pytest.mark.parametrize(
    ("script", "code"), [("", 75), ("process_group.MIN_TIMEOUT_S = 1\n", 8)], ids=["signal", "time"]
)
def test_the_wait_for_a_missing_first_rank_ends(tmp_path: Path, script: str, code: int) -> None:
    """By the signal that may have stopped it before it started, or by the time limit."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = ["train", "--data", "none", "--out", tmp_path / "run", "--device", "cpu"]
    command += ["--rank-timeout", "1"]
    script = ANNOUNCES_ITS_WAIT + script + COMMAND
    process = run_script(script, *command, **common, RANK="1", LOCAL_RANK="1")
    try:
        log = tmp_path / "run" / "logs" / "rank-1.log"
        wait_for(lambda: log.exists() and "waiting" in log.read_text())
        if code == 75:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == code
    finally:
        process.kill()
        process.communicate()


FAILS_EARLY = """
import socket, sys, time
from ssdctl.device import open_device
from ssdctl.distributed import find_ranks
from ssdctl.distributed.collectives import any_rank
from ssdctl.distributed.process_group import process_group
from ssdctl.errors import DataError, SsdctlError

ranks = find_ranks()
socket.gethostname = f"node{ranks.rank}".__str__
try:
    with process_group(ranks, open_device("cpu"), 60):
        if ranks.is_main:
            raise DataError("of rank 0")
        time.sleep(2)
        any_rank([False], ranks)
except SsdctlError as error:
    print(error)
    sys.exit(error.exit_code)
"""


def test_a_first_rank_that_fails_tells_the_others_before_it_ends() -> None:
    ranks = run_ranks(2, FAILS_EARLY)
    assert [(r.code, r.out.strip()) for r in ranks] == [
        (3, "of rank 0"), (3, "host node0: of rank 0"),
    ]  # fmt: skip


LOSES_ITS_STORE = """
import os, sys
from ssdctl.errors import DiskError
from ssdctl.training import step_input

open_input = step_input.open_input

def opened(*given, **named):
    source = open_input(*given, **named)
    whole = source.batches

    def batches(*steps):
        for number, batch in enumerate(whole(*steps)):
            if number == 3 and os.environ["RANK"] == "1":
                raise DiskError("the store is gone")
            yield batch

    source.batches = batches
    return source

step_input.open_input = opened
"""


def test_a_rank_that_cannot_read_images_lets_all_save_and_end(shapes: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    options = ["--steps", 9, *TINY_RUN.split(), "--rank-timeout", 30]
    script = LOSES_ITS_STORE + COMMAND
    ranks = run_ranks(2, script, "train", "--data", shapes, "--out", run, *options)
    assert [rank.code for rank in ranks] == [6, 6], ranks
    texts = [*(path.read_text() for path in (run / "logs").iterdir()), *(r.err for r in ranks)]
    assert any("the store is gone" in text for text in texts), texts
    assert not any("lost rank" in text or "Traceback" in text for text in texts)
    assert last(run).step == 3
    assert last(run).rank_statistics is not None


EVALUATE = """
import json, os, sys
import ssdctl
from ssdctl.data import image_check, open_dataset

os.environ["MASTER_PORT"], checkpoint, data = sys.argv[1:4]
compared = []
changed_images = open_dataset.changed_images
open_dataset.changed_images = lambda *a: compared.append(a) or changed_images(*a)
result = ssdctl.evaluate(checkpoint, data, device="cpu", report="page", progress=False)

from torch import distributed as dist

dist.init_process_group(
    "gloo", init_method=f"file://{data}/group", rank=int(os.environ.pop("RANK")), world_size=2
)
again = ssdctl.evaluate(checkpoint, data, device="cpu", progress=False)
assert again.metrics == result.metrics
count = len(compared)
model = ssdctl.SSD300.from_checkpoint(checkpoint)
model.class_heads[0].bias.data += dist.get_rank()  # the first rank's is scored
live = ssdctl.evaluate(model, data, device="cpu", progress=False)
assert live.metrics == result.metrics
if dist.get_rank() == 1:
    alone = ssdctl.evaluate(
        checkpoint, data, device="cpu", report="alone", distributed=False, progress=False
    )
    assert alone.metrics == result.metrics
    assert os.path.exists("alone/report.html")
print(json.dumps([result.metrics["AP"], result.about.images, count]))
"""


def test_every_rank_gets_the_evaluation(checkpoint: Path, shapes: Path, tmp_path: Path) -> None:
    """The first rank prepares the dataset and compares its images for all; a process group of the
    caller serves, too, and a rank can score without the other one."""
    data = tmp_path / "shapes"
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    ranks = run_ranks(2, EVALUATE, free_port(), checkpoint, data, start=start_script)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    first, (*same, compared) = [json.loads(rank.out) for rank in ranks]
    assert (first[:2], first[1]) == (same, 9)
    assert compared == 0
