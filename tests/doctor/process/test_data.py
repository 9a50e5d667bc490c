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
from doctor.machines import Cli, Machine, RunDoctor, state
from download.http_server import Reply, Server

from ssdctl.doctor import data as network
from ssdctl.download.pinned_files import COCO2017, PinnedFile
from ssdctl.model.backbones import resnet34


def test_the_states_of_a_dataset(
    run_doctor: RunDoctor, cli: Cli, machine: Machine, shapes: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    assert run_doctor("--data", data)[1]["dataset"]["state"] == "warn"
    assert "store" not in run_doctor("--data", data)[1]
    shutil.copytree(shapes, data, ignore=shutil.ignore_patterns("prepared"))
    _, checks = run_doctor("--data", data)
    assert state(checks["dataset"]) == ("ok", f"{data}: coco")
    assert state(checks["store"]) == ("warn", f"{data}/prepared: not prepared")
    assert checks["store"]["remedy"] == f"ssdctl prepare --data {data}"
    assert cli("prepare", "--data", data).code == 0
    checks = run_doctor("--data", data)[1]
    assert state(checks["dataset"]) == ("ok", f"{data}: train and val")
    assert state(checks["store"]) == ("ok", f"{data}/prepared: prepared, packed")
    annotations = data / "annotations" / "instances_val2017.json"
    annotations.write_text(annotations.read_text() + " ")
    assert "stale" in run_doctor("--data", data)[1]["store"]["detail"]
    next((data / "prepared").glob("images-train-*")).unlink()
    assert "incomplete (a shard" in run_doctor("--data", data)[1]["store"]["detail"]
    machine.put(data / "prepared" / "index-train.arrow", "no arrow")
    assert "unreadable" in run_doctor("--data", data)[1]["store"]["detail"]
    machine.put(data / "dataset.toml", "[train]\nimages = 3")
    code, checks = run_doctor("--data", data)
    assert (code, checks["dataset"]["state"]) == (2, "fail")


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
        prefix = [
            "/usr/bin/unshare",
            "--mount",
            "/bin/sh",
            "-c",
            f"PATH=/usr/bin:/bin; {mount}",
            "-",
        ]
        if not Path(prefix[0]).exists() or subprocess.run([*prefix, "/bin/true"]).returncode:
            pytest.skip("cannot mount here")
    done = subprocess.run([*prefix, *doctor], capture_output=True, text=True, timeout=60)
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert checks["disk"]["state"] == "warn"
    assert f"{data} is read-only" in checks["disk"]["detail"]
    assert "--store DIR" in checks["disk"]["remedy"]
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
    check = run_doctor()[1]["weights"]
    assert check["state"] == "absent"
    assert f"resnet34-imagenet-v1: not in {cache}" in check["detail"]
    assert check["remedy"] == "ssdctl fetch-weights resnet34-imagenet-v1"
    cache.mkdir(parents=True)
    (cache / "tiny.pth").write_bytes(content)
    expected = f"{cache}/tiny.pth, 700 bytes, SHA-256 verified"
    assert state(run_doctor()[1]["weights"]) == ("ok", expected)
    (cache / "tiny.pth").write_bytes(content[1:])
    assert "SHA-256 is not" in run_doctor()[1]["weights"]["detail"]
    assert run_doctor("--set", "model.weights=none")[1]["weights"]["state"] == "ok"
    code, checks = run_doctor("--set", "model.weights=resnet34-imagenet-v9")
    assert (code, checks["weights"]["state"]) == (2, "fail")


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
    assert f"{host} has its {train.bytes:,} bytes" in checks["train"]["detail"]
    assert checks["val"]["state"] == "fail"
    assert f"has 1,000 bytes, expected are {val.bytes:,}" in checks["val"]["detail"]
    assert "answers 404" in checks["annotations"]["detail"]
    assert checks["weights"]["state"] == "ok"
    assert server.body_bytes < 1000, "a byte or a refusal each, no download"


def test_a_mirror_keeps_its_password(
    run_doctor: RunDoctor, machine: Machine, server: Server
) -> None:
    train = COCO2017["train"]
    head = {"Content-Range": f"bytes 0-0/{train.bytes}"}
    server.route("/train2017.zip", lambda _: Reply(206, head, b"P"))
    mirror = server.url.replace("://", "://dave:mute@")
    _, checks = run_doctor("--network", "--mirror", mirror)
    assert [checks[name]["state"] for name in ("train", "val")] == ["ok", "fail"]
    assert "://***@127.0.0.1" in checks["val"]["detail"]
    assert not re.search("dave|mute", json.dumps(checks))
    _, checks = run_doctor("--network", "--mirror", f"{server.url}/?token=mute")
    assert "?***" in checks["val"]["detail"]
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
    assert (code, checks["train"]["state"]) == (2, "fail")
    assert checks["train"]["remedy"]
    assert "weights" in checks
    assert checks["weights"]["group"] == "Data", "nothing to fetch"
