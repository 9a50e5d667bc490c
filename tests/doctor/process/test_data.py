"""Dataset, store, weights, and the hosts that they come from."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Cli
from doctor.machines import Machine, RunDoctor, expect
from download.http_server import Reply, Server

from ssdctl.doctor import data as network
from ssdctl.download.pinned_files import COCO2017, PinnedFile
from ssdctl.model.backbones import resnet34


def test_the_states_of_a_dataset(
    run_doctor: RunDoctor, cli: Cli, machine: Machine, shapes: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"

    def checks(name: str) -> dict[str, str]:
        return run_doctor("--data", data)[1][name]

    expect(checks("dataset"), "warn")
    assert "store" not in run_doctor("--data", data)[1]
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    expect(checks("dataset"), "ok", f"{data}: coco")
    expect(checks("store"), "warn", f"{data}/prepared: not", f"ssdctl prepare --data {data}")
    assert cli("prepare", "--data", data).code == 0
    expect(checks("dataset"), "ok", f"{data}: train and val")
    expect(checks("store"), "ok", f"{data}/prepared: prepared, packed")
    annotations = data / "annotations" / "instances_val2017.json"
    annotations.write_text(annotations.read_text() + " ")
    expect(checks("store"), "warn", "stale")
    next((data / "prepared").glob("images-train-*")).unlink()
    expect(checks("store"), "warn", "shard")
    machine.put(data / "prepared" / "index-train.arrow", "no arrow")
    expect(checks("store"), "warn", "unreadable")
    machine.put(data / "dataset.toml", "[train]\nimages = 3")
    code, broken = run_doctor("--data", data)
    assert code == 2
    expect(broken["dataset"], "fail")


def test_a_read_only_data_folder(machine: Machine, shapes: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    data.chmod(0o555)
    # A store inside it; without --store the index would go to the user's cache folder.
    doctor = [sys.executable, "-m", "ssdctl", "doctor", "--json", "--data", str(data)]
    doctor += ["--store", str(data / "prepared")]
    write = [sys.executable, "-m", "ssdctl.doctor.probes", "disk", str(data)]
    prefix: list[str] = []
    if os.geteuid() == 0:  # whom permissions do not stop: a mount does
        mount = f'mount --bind {data} {data} && mount -o remount,ro,bind {data} && exec "$@"'
        prefix = ["/usr/bin/unshare", "--mount", "/bin/sh", "-c"]
        prefix += [f"PATH=/usr/bin:/bin; {mount}", "-"]
        if not Path(prefix[0]).exists() or subprocess.run([*prefix, "/bin/true"]).returncode:
            pytest.skip("cannot mount here")
    done = subprocess.run([*prefix, *doctor], capture_output=True, text=True, timeout=60)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    expect(checks["disk"], "warn", f"{data} is read-only", "--store DIR")
    tried = subprocess.run([*prefix, *write], capture_output=True, text=True, timeout=60)
    assert tried.returncode == 1
    assert tried.stderr.strip() in ("Read-only file system", "Permission denied")
    data.chmod(0o755)


def test_backbone_weights(
    run_doctor: RunDoctor, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"weights" * 100
    pin = hashlib.sha256(content).hexdigest()
    file = PinnedFile("tiny.pth", "http://127.0.0.1:1/tiny.pth", pin)
    monkeypatch.setitem(resnet34.WEIGHTS, "imagenet-v1", file)
    cache = Path(os.environ["TORCH_HOME"]) / "hub" / "checkpoints"
    fetch = "ssdctl fetch-weights resnet34-imagenet-v1"
    expect(run_doctor()[1]["weights"], "absent", str(cache), fetch)
    cache.mkdir(parents=True)
    (cache / "tiny.pth").write_bytes(content)
    expect(run_doctor()[1]["weights"], "ok", f"{cache}/tiny.pth, 700 bytes, SHA-256 verified")
    (cache / "tiny.pth").write_bytes(content[1:])
    expect(run_doctor()[1]["weights"], "warn", f"{cache}/tiny.pth", "SHA-256", fetch)
    expect(run_doctor("--set", "model.weights=none")[1]["weights"], "ok")
    code, checks = run_doctor("--set", "model.weights=resnet34-imagenet-v9")
    assert code == 2
    expect(checks["weights"], "fail", "resnet34-imagenet-v9")


def test_the_download_hosts(run_doctor: RunDoctor, machine: Machine, server: Server) -> None:
    def of_size(num_bytes: int | None) -> Callable[..., Reply]:
        return lambda _: Reply(206, {"Content-Range": f"bytes 0-0/{num_bytes}"}, b"P")

    train, val = COCO2017["train"], COCO2017["val"]
    server.route("/train2017.zip", of_size(train.bytes))
    server.route("/val2017.zip", of_size(1000))
    server.route("/models/resnet34-b627a593.pth", of_size(87_319_819))
    code, checks = run_doctor("--network", "--mirror", server.url)
    assert code == 2
    assert all(checks[n]["group"] == "Network" for n in ("proxies", "train", "weights"))
    host = server.url.removeprefix("http://")
    expect(checks["train"], "ok", host, f"{train.bytes:,}")
    expect(checks["val"], "fail", "1,000 bytes", f"{val.bytes:,}")
    expect(checks["annotations"], "fail", "404")
    expect(checks["weights"], "ok")
    assert server.body_bytes < 1000, "a byte or a refusal each, no download"


def test_a_mirror_keeps_its_password(
    run_doctor: RunDoctor, machine: Machine, server: Server
) -> None:
    train = COCO2017["train"]
    head = {"Content-Range": f"bytes 0-0/{train.bytes}"}
    server.route("/train2017.zip", lambda _: Reply(206, head, b"P"))
    mirror = server.url.replace("://", "://dave:mute@")
    _, checks = run_doctor("--network", "--mirror", mirror)
    expect(checks["train"], "ok")
    expect(checks["val"], "fail", "://***@127.0.0.1")
    assert not re.search("dave|mute", json.dumps(checks))
    _, checks = run_doctor("--network", "--mirror", f"{server.url}/?token=mute")
    expect(checks["val"], "fail", "?***")
    assert "mute" not in json.dumps(checks)


def test_a_network_that_drops_everything(
    run_doctor: RunDoctor, machine: Machine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.route("/train2017.zip", lambda _: Reply(head_pause_s=30))
    monkeypatch.setattr(
        network, "RETRY_POLICY", network.RETRY_POLICY._replace(read_s=0.5, stall_s=1)
    )
    start = time.monotonic()
    code, checks = run_doctor("--network", "--mirror", server.url, "--set", "model.weights=none")
    assert time.monotonic() - start < 20
    assert code == 2
    expect(checks["train"], "fail", "--mirror")
    assert checks["weights"]["group"] == "Data", "nothing to fetch"
