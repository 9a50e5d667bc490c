"""Models on the Hugging Face Hub, from a loopback server: fetched, checked, kept, and refused."""

import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import Cli, Result
from download.hub_server import TOKEN, HubServer, Repository, open_hub

import ssdctl
from ssdctl.model.ssd300 import SSD300

pytest.importorskip("huggingface_hub")
NAME = "hf://acme/shapes-ssd"
ARCHITECTURE = {"backbone": "tiny", "extra_norm": "none", "num_classes": 3}


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
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


def export(cli: Cli, name: str) -> Result:
    return cli("export", name, "--format", "mlperf", "--out", "x.pt")


def test_no_other_package_has_to_import_the_clients_modules() -> None:
    """huggingface_hub has lazy attributes, but not for all of its modules."""
    code = "from ssdctl.download.hub import endpoint, hub_package; print(endpoint(hub_package()))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.startswith("https://")


def test_a_model_is_fetched_once_and_then_found_without_network(
    hub: HubServer, files: dict[str, bytes], caplog: pytest.LogCaptureFixture
) -> None:
    old = json.loads(files["config.json"])
    old["classes"][0]["name"] = "circle"
    tag = {**files, "config.json": json.dumps(old).encode()}
    hub.repositories["acme/shapes-ssd"] = Repository(files, tags={"v1": tag})
    with caplog.at_level(logging.INFO):
        predictor = ssdctl.load(NAME, device="cpu")
    assert predictor.model.class_names == ["disc", "box"]
    commit = hub.repositories["acme/shapes-ssd"].commit("main")
    assert commit[0] in caplog.text
    assert ssdctl.load(f"{NAME}@v1", device="cpu").model.class_names == ["circle", "box"]
    for hub.status in (503, 429):
        caplog.clear()
        assert ssdctl.load(NAME, device="cpu").model.class_names == ["disc", "box"]
        assert re.findall(r"cannot be reached, using commit (\w+)", caplog.text) == [commit[0]]


def test_errors_name_url_and_folder_and_no_secret(
    cli: Cli, hub: HubServer, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(name: str, code: int, *words: str) -> None:
        result = export(cli, name)
        text = result.err.replace("\n", "")
        assert result.code == code, text
        assert not [word for word in (name, *words) if word not in text], text
        assert TOKEN not in text
        assert "pw" not in text

    hub.repositories["acme/shapes-ssd"] = Repository(files)
    hub.repositories["acme/text"] = Repository({"config.json": files["config.json"]})
    for text in ("hf://a", "hf://a/b/c", "hf://a/../b", "hf://a/b@", "hf://a/b@x y"):
        fails(text, 2)
    fails(f"{NAME}@refs/pr/1", 2, "branch, tag or commit")
    fails("hf://acme/none", 2, "repository")
    fails(f"{NAME}@v9", 2, "branch, tag or commit")
    fails("hf://acme/text", 2, "model.safetensors")
    for hub.status, code in ((403, 2), (500, 4)):
        fails(NAME, code, str(hub.status))
    monkeypatch.setenv("HF_ENDPOINT", "http://user:pw@127.0.0.1:9")
    address = "127.0.0.1:9/acme/shapes-ssd/resolve/main"
    fails("hf://acme/shapes-ssd", 4, address, "FOLDER/model.safetensors")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    hub.status, cache = None, Path("cache")
    cache.touch()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    fails(NAME, 6, "Not a directory", str(cache))
    cache.unlink()
    full = RuntimeError("Task error: IO Error: No space left on device (os error 28)")  # hf_xet's
    monkeypatch.setattr("huggingface_hub.hf_hub_download", Mock(side_effect=full))
    fails(NAME, 6, "no space left", str(cache))


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
    result = export(cli, NAME).expect(5)
    assert str(blob) in result.err.replace("\n", "")


def test_hostile_descriptions_and_damaged_weights(cli: Cli, files: dict[str, bytes]) -> None:
    def code(config: bytes, weights: bytes = files["model.safetensors"]) -> int:
        Path("config.json").write_bytes(config)
        Path("model.safetensors").write_bytes(weights)
        return export(cli, "model.safetensors").code

    intact = files["config.json"]
    changes: tuple[dict[str, object], ...] = (
        {"architecture": ARCHITECTURE | {"num_classes": 10**9}},
        {"architecture": ARCHITECTURE | {"num_classes": 90_001}},
        {"classes": [{"id": 1, "name": 5}, {"id": 2, "name": "b"}]},
        {"classes": [{"id": 10**30, "name": "a"}, {"id": 2, "name": "b"}]},
        {"format": 2},
        {"step": -1},
    )
    for change in changes:
        assert code(json.dumps(json.loads(intact) | change).encode()) == 5, change
    assert code(json.dumps(json.loads(intact) | {"classes": []}).encode()) == 0
    other = {"architecture": ARCHITECTURE | {"backbone": "vit"}}  # of a plugin, perhaps
    assert code(json.dumps(json.loads(intact) | other).encode()) == 2
    cut = files["model.safetensors"][:-100]
    for content in (b"", b"\xff" * 9, b'\x08\0\0\0\0\0\0\0{"a":1}x', b"PK" * 50, cut):
        assert code(intact, content) == 5, content[:20]
