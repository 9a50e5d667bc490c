"""Dataset, store, weights, and the hosts that they come from."""

import hashlib
import json
import os
import re
from pathlib import Path

import pytest
from conftest import Cli
from doctor.machines import Machine, expect
from download.http_server import Reply, Route, Server

from ssdctl.download.pinned_files import COCO2017, PinnedFile
from ssdctl.model.backbones.resnet import resnet34


def test_the_states_of_a_dataset(cli: Cli, machine: Machine, dataset: Path) -> None:
    def states(code: int = 0) -> dict[str, dict[str, str]]:
        return machine.doctor("--data", dataset, code=code)

    absent = machine.doctor("--data", dataset / "none")
    expect(absent["dataset"], "warn")
    assert "store" not in absent
    checks = states()
    expect(checks["dataset"], "ok", f"{dataset}: coco")
    expect(checks["store"], "warn", f"{dataset}/prepared: not", f"ssdctl prepare --data {dataset}")
    assert cli("prepare", "--data", dataset).code == 0
    checks = states()
    expect(checks["dataset"], "ok", f"{dataset}: train and val")
    expect(checks["store"], "ok", f"{dataset}/prepared: prepared, packed")
    annotations = dataset / "annotations" / "instances_val2017.json"
    annotations.write_text(annotations.read_text() + " ")
    expect(states()["store"], "warn", "stale")
    next((dataset / "prepared").glob("images-train-*")).unlink()
    expect(states()["store"], "warn", "shard")
    machine.put(dataset / "prepared" / "index-train.arrow", "no arrow")
    expect(states()["store"], "warn", "unreadable")
    assert cli("prepare", "--data", dataset, "--force").code == 0
    (dataset / "train2017").rename(dataset / "elsewhere")
    expect(states()["dataset"], "ok", "only a packed store works")
    (dataset / "elsewhere").rename(dataset / "train2017")
    assert cli("prepare", "--data", dataset, "--no-pack").code == 0
    (dataset / "train2017").rename(dataset / "elsewhere")
    expect(states(code=2)["dataset"], "fail", "only a packed store works")
    machine.put(dataset / "dataset.toml", "[train]\nimages = 3")
    expect(states(code=2)["dataset"], "fail", "dataset.toml")
    expect(machine.doctor("--data", "absent", "--store", "/dev/shm/s")["disk"], "ok")
    machine.free_bytes //= 2
    expect(machine.doctor("--data", "absent")["disk"], "warn", "32 GB free", "42 GB")


def test_read_only_folder(machine: Machine, dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access  # nothing stops root but a mount
    monkeypatch.setattr(os, "access", lambda path, mode: path != dataset and access(path, mode))
    checks = machine.doctor("--data", dataset, "--store", dataset / "prepared")
    expect(checks["disk"], "warn", f"{dataset}; you may not write there", "--store DIR")


def test_backbone_weights(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b"weights" * 100
    pin = hashlib.sha256(content).hexdigest()
    file = PinnedFile("tiny.pth", "http://127.0.0.1:1/tiny.pth", pin)
    monkeypatch.setitem(resnet34.WEIGHTS, "imagenet-v1", file)
    cache = Path(os.environ["TORCH_HOME"]) / "hub" / "checkpoints"
    fetch = "ssdctl fetch-weights resnet34-imagenet-v1"
    machine.expect("weights", "absent", str(cache), fetch)
    cache.mkdir(parents=True)
    (cache / "tiny.pth").write_bytes(content)
    machine.expect("weights", "ok", f"{cache}/tiny.pth, 700 bytes, SHA-256 verified")
    (cache / "tiny.pth").write_bytes(content[1:])
    machine.expect("weights", "warn", f"{cache}/tiny.pth", "SHA-256", fetch)
    expect(machine.doctor("--set", "model.weights=none")["weights"], "ok")
    checks = machine.doctor("--set", "model.weights=resnet34-imagenet-v9", code=2)
    expect(checks["weights"], "fail", "resnet34-imagenet-v9")


def of_size(num_bytes: int | None) -> Route:
    return lambda _: Reply(206, {"Content-Range": f"bytes 0-0/{num_bytes}"}, b"P")


def test_the_download_hosts(machine: Machine, server: Server) -> None:
    train, val = COCO2017["train"], COCO2017["val"]
    server.route("/train2017.zip", of_size(train.bytes))
    server.route("/val2017.zip", of_size(1000))
    server.route("/models/resnet34-b627a593.pth", of_size(87_319_819))
    checks = machine.doctor("--network", "--mirror", server.url, code=2)
    assert all(checks[n]["group"] == "Network" for n in ("proxies", "train", "weights"))
    host = server.url.removeprefix("http://")
    expect(checks["train"], "ok", host, f"{train.bytes:,}")
    expect(checks["val"], "fail", "1,000 bytes", f"{val.bytes:,}")
    expect(checks["annotations"], "fail", "404")
    expect(checks["weights"], "ok")
    assert server.body_bytes < 1000, "a byte or a refusal each, no download"


def test_a_mirror_keeps_its_password(machine: Machine, server: Server) -> None:
    server.route("/train2017.zip", of_size(COCO2017["train"].bytes))
    mirror = server.url.replace("://", "://dave:mute@")
    checks = machine.doctor("--network", "--mirror", mirror, code=2)
    expect(checks["train"], "ok")
    expect(checks["val"], "fail", "://***@127.0.0.1")
    assert not re.search("dave|mute", json.dumps(checks))
    checks = machine.doctor("--network", "--mirror", f"{server.url}/?token=mute", code=2)
    expect(checks["val"], "fail", "?***")
    assert "mute" not in json.dumps(checks)
