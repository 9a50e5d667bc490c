"""Detectors by name: fetched, checked, recorded, and used wherever a checkpoint is expected."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from conftest import Cli, Result
from download.http_server import Server, file

import ssdctl
from ssdctl.checkpoint import third_party
from ssdctl.download import pinned_files
from ssdctl.model.ssd300 import SSD300

NAMES = ("ssd300-vgg16-coco", "nvidia-ssd300-coco")


@pytest.fixture(scope="module")
def nvidia_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in NVIDIA's layout, of random weights, without a table of names."""
    torch.manual_seed(0)
    state = SSD300("tiny", 81, "batch").state_dict()
    payload = {"epoch": 64, "iteration": 7500, "optimizer": {}, "scheduler": {}}
    payload["model"] = third_party.to_third_party(state, "nvidia")
    path = tmp_path_factory.mktemp("nvidia") / "nvidia_ssdpyt_amp_200703.pt"
    torch.save(payload, path)
    return path


def serve_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        d._replace(file=d.file._replace(url=f"{url}/{d.file.name}")) for d in pinned_files.DETECTORS
    ]
    monkeypatch.setattr(pinned_files, "DETECTORS", tuple(sources))


@pytest.fixture
def published(
    server: Server, nvidia_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Server:
    """A loopback server that has NVIDIA's file, and an empty cache."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    server.route(f"/files/{nvidia_file.name}", file(nvidia_file.read_bytes()))
    serve_at(f"{server.url}/files", monkeypatch)
    return server


@pytest.fixture
def cached(tmp_path: Path) -> Path:
    return tmp_path / "torch/hub/checkpoints/nvidia_ssdpyt_amp_200703.pt"


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def export(cli: Cli, name: str = NAMES[1], kind: str = "nvidia") -> Result:
    return cli("export", name, "--format", kind, "--out", "x.pt")


def test_a_name_is_fetched_recorded_and_exported(
    cli: Cli, published: Server, cached: Path, nvidia_file: Path
) -> None:
    recorded = cached.with_name(cached.name + ".sha256")
    published.route(f"/files/{cached.name}", file(b"not a checkpoint" * 100))
    export(cli).expect(5, f"{cached}.corrupt")
    assert not recorded.exists()
    published.route(f"/files/{cached.name}", file(nvidia_file.read_bytes()))
    recorded.mkdir()  # it cannot be written, as in a read-only cache
    export(cli).expect(0, "later changes of")
    recorded.rmdir()
    result = export(cli).expect(0)
    digest = sha256_of(cached)
    assert digest in result.err  # named at the first use
    assert digest in recorded.read_text()
    # COCO's names and ids come with 81 outputs.
    names = torch.load("x.pt", weights_only=True)["label_map"]
    assert (names[1], names[80]) == ("person", "toothbrush")

    with cached.open("ab") as stream:
        stream.write(b"more")
    export(cli).expect(5, digest, sha256_of(cached))
    listed = json.loads(cli("models", "--json").expect(0, "broken: ").out)
    assert (len(listed["models"]), listed["models"][1]["path"]) == (2, None)
    assert str(cached) in listed["broken"][0]

    cached.unlink()
    recorded.unlink()
    answer = json.loads(cli("fetch-weights", "nvidia-ssd300-coco", "--json").expect(0).out)
    assert (answer["path"], answer["sha256"]) == (str(cached), digest)
    assert answer["trust"] == "first use"
    assert digest in recorded.read_text()
    assert json.loads(cli("models", "--json").out)["models"][1]["path"] == str(cached)


def test_a_name_works_wherever_a_checkpoint_does(cli: Cli, published: Server, shapes: Path) -> None:
    image = sorted((shapes / "val2017").iterdir())[0]
    predictor = ssdctl.load("nvidia-ssd300-coco", device="cpu", score=0.01)
    assert predictor.model.class_names[0] == "person"
    common = ("--score", 0.01, "--device", "cpu", "--json")
    result = cli("predict", "nvidia-ssd300-coco", image, *common).expect(0)
    found = [d.as_json() for d in predictor.predict(image)]
    assert json.loads(result.out)[0]["detections"] == found != []
    evaluate = ("evaluate", "nvidia-ssd300-coco", "--data", shapes, "--device", "cpu")
    cli(*evaluate).expect(5, "classes")  # it was read: these are not those of the dataset
    result = cli(
        "train", "--init", "nvidia-ssd300-coco", "--data", shapes, "--out", "r", "--steps", 1,
        "--backbone", "tiny", "--extra-norm", "batch", "--bs", 2, "--warmup", "0st",
        "--device", "cpu", "--fp32", "--workers", 1,
    )  # fmt: skip
    result.expect(0, "nvidia_ssdpyt_amp_200703.pt")
