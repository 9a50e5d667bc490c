"""Models on the Hugging Face Hub, from a loopback server: fetched, checked, kept, and refused."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Cli, Result
from download.hub_server import TOKEN, HubServer, Repository, open_hub

import ssdctl
from ssdctl.download.hub import HubReference, parse_reference
from ssdctl.errors import UsageError
from ssdctl.model.ssd300 import SSD300

pytest.importorskip("huggingface_hub")
NAME = "hf://acme/shapes-ssd"
ARCHITECTURE = {"backbone": "tiny", "extra_norm": "none", "num_classes": 3}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    """Return a model of random weights."""
    from safetensors.torch import save

    torch.manual_seed(0)
    config = {
        "architecture": ARCHITECTURE,
        "classes": [{"id": 7, "name": "disc"}, {"id": 9, "name": "box"}],
        "step": 12,
    }
    state = SSD300("tiny", 3, "none").state_dict()
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(state)}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with open_hub(tmp_path, monkeypatch) as server:
        yield server


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hf://a/b", HubReference("a/b", "main")),
        ("hf://org-1/name_2.x@v1.0", HubReference("org-1/name_2.x", "v1.0")),
        ("hf://a/b@refs/pr/1", HubReference("a/b", "refs/pr/1")),
    ],
)
def test_references(text: str, expected: HubReference) -> None:
    assert parse_reference(text) == expected


def export(cli: Cli, name: str) -> Result:
    return cli("export", name, "--format", "mlperf", "--out", "x.pt")


def test_no_other_package_has_to_import_the_clients_modules() -> None:
    """huggingface_hub has lazy attributes, but not for all of its modules."""
    code = "from ssdctl.download.hub import endpoint, hub_package; print(endpoint(hub_package()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("https://")


@pytest.mark.parametrize(
    "text", ["hf://a", "hf://a/b/c", "hf://a/../b", "hf://a/b@", "hf://a/b@x y"]
)
def test_other_forms_are_refused_by_name(cli: Cli, text: str) -> None:
    with pytest.raises(UsageError, match="hf://"):
        parse_reference(text)
    result = export(cli, text)
    assert result.code == 2
    assert text in result.err


def test_a_model_is_fetched_once_and_then_found_without_network(
    cli: Cli, hub: HubServer, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    hub.repositories["acme/shapes-ssd"] = Repository(files)
    with caplog.at_level(logging.INFO):
        predictor = ssdctl.load(NAME, device="cpu")
    assert predictor.model.class_names == ["disc", "box"]
    commit = hub.repositories["acme/shapes-ssd"].commit("main")
    assert commit is not None
    assert commit[0] in caplog.text
    hub.status = 503
    again = ssdctl.load(NAME, device="cpu")
    assert again.model.class_names == ["disc", "box"]


def test_a_revision(hub: HubServer, files: dict[str, bytes]) -> None:
    old = json.loads(files["config.json"])
    old["classes"][0]["name"] = "circle"
    tag = {**files, "config.json": json.dumps(old).encode()}
    hub.repositories["acme/shapes-ssd"] = Repository(files, tags={"v1": tag})
    assert ssdctl.load(f"{NAME}@v1", device="cpu").model.class_names == ["circle", "box"]
    assert ssdctl.load(NAME, device="cpu").model.class_names == ["disc", "box"]


def test_names_that_are_not_there(cli: Cli, hub: HubServer, files: dict[str, bytes]) -> None:
    hub.repositories["acme/shapes-ssd"] = Repository(files)
    hub.repositories["acme/text"] = Repository({"config.json": files["config.json"]})
    for name, subject in (
        ("hf://acme/none", "repository"),
        (f"{NAME}@v9", "branch, tag or commit"),
        ("hf://acme/text", "model.safetensors"),
    ):
        result = export(cli, name)
        assert result.code == 2, result.err
        assert name in result.err
        assert subject in result.err
        assert TOKEN not in result.err


def test_errors_name_url_and_folder_and_no_secret(
    cli: Cli, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for status, code in ((403, 2), (500, 4)):
        hub.status = status
        result = export(cli, NAME)
        assert result.code == code
        assert str(status) in result.err
        assert TOKEN not in result.err
    monkeypatch.setenv("HF_ENDPOINT", "http://user:pw@127.0.0.1:9")
    result = export(cli, NAME)
    assert result.code == 4
    assert "127.0.0.1:9/acme/shapes-ssd/resolve/main" in result.err.replace("\n", "")
    assert "FOLDER/model.safetensors" in result.err
    assert "pw" not in result.err


def test_large_and_damaged_files_are_refused(
    cli: Cli, hub: HubServer, files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.repositories["acme/shapes-ssd"] = Repository(files)
    hub.fake_size = 100 << 30
    assert export(cli, NAME).code == 5
    assert not [p for p in (tmp_path / "hub").rglob("*") if p.is_file()]
    hub.fake_size = None
    assert export(cli, NAME).code == 0
    blob = next(p.resolve() for p in (tmp_path / "hub").rglob("model.safetensors"))
    content = bytearray(blob.read_bytes())
    content[-9] ^= 1
    blob.write_bytes(content)
    result = export(cli, NAME)
    assert result.code == 5
    assert str(blob) in result.err.replace("\n", "")


def test_a_folder_with_the_files(cli: Cli, files: dict[str, bytes], shapes: Path) -> None:
    folder = Path("model")
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    image = sorted((shapes / "val2017").iterdir())[0]
    results = [
        cli("predict", model, image, "--score", 0.01, "--json", "--device", "cpu")
        for model in (folder, folder / "model.safetensors")
    ]
    assert [r.code for r in results] == [0, 0], results[0].err
    assert results[0].out == results[1].out


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": ARCHITECTURE | {"num_classes": 10**9}},
        {"architecture": ARCHITECTURE | {"num_classes": 90_001}},
        {"architecture": ARCHITECTURE | {"backbone": "vit"}},
        {"classes": [{"id": 1, "name": 5}, {"id": 2, "name": "b"}]},
        {"classes": [{"id": 10**30, "name": "a"}, {"id": 2, "name": "b"}]},
        {"classes": []},
        {"format": 2},
        {"step": -1},
    ],
)
def test_hostile_descriptions(cli: Cli, files: dict[str, bytes], change: dict[str, object]) -> None:
    Path("config.json").write_text(json.dumps(json.loads(files["config.json"]) | change))
    Path("model.safetensors").write_bytes(files["model.safetensors"])
    result = export(cli, "model.safetensors")
    expected = 0 if change == {"classes": []} else 5
    assert result.code == expected, result.err


@pytest.mark.parametrize("content", [b"", b"\xff" * 9, b'\x08\0\0\0\0\0\0\0{"a":1}x', b"PK" * 50])
def test_damaged_weights(cli: Cli, files: dict[str, bytes], content: bytes) -> None:
    Path("config.json").write_bytes(files["config.json"])
    for damaged in (content, files["model.safetensors"][:-100]):
        Path("model.safetensors").write_bytes(damaged)
        result = export(cli, "model.safetensors")
        assert result.code == 5, result.err
