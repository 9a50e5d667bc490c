"""Backbone weights: the cache, the names, and use without network."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest
import torch
from download.http_server import Server, file

from ssdctl.download.fetch import torch_cache_dir
from ssdctl.download.http import RetryPolicy
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.errors import NetworkError
from ssdctl.model.backbones import tiny as tiny_backbone
from ssdctl.model.pretrained import fetch_weights, find_weights

CONTENT = bytes(range(256)) * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()
STEM = f"tiny-{DIGEST[:8]}"
QUICK = RetryPolicy(connect_retries=0)


@pytest.fixture
def tiny(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Weights that the loopback server has, pinned by the start of their hash."""
    url = server.route(f"/models/{STEM}.pth", file(CONTENT))
    pinned = PinnedFile(f"{STEM}.pth", url, DIGEST[:8])
    monkeypatch.setitem(tiny_backbone.WEIGHTS, "v1", pinned)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return STEM


HOMES = [
    ("XDG_CACHE_HOME", "/x/cache", "/x/cache/torch/hub/checkpoints"),
    ("TORCH_HOME", "~/torch", str(Path("~/torch/hub/checkpoints").expanduser())),
    ("XDG_CACHE_HOME", "", str(Path("~/.cache/torch/hub/checkpoints").expanduser())),
]


@pytest.mark.parametrize(("name", "value", "expected"), HOMES)
def test_the_cache_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str
) -> None:
    """As torch.hub's."""
    monkeypatch.delenv("TORCH_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if value:
        monkeypatch.setenv(name, value)
    assert str(torch_cache_dir()) == f"{torch.hub.get_dir()}/checkpoints" == expected


def test_fetched_once_then_cached(
    server: Server, tiny: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ssdctl")
    assert find_weights(tiny) is None
    path = fetch_weights("tiny-v1", retry_policy=QUICK)
    assert path == tmp_path / "torch" / "hub" / "checkpoints" / f"{STEM}.pth"
    assert path.read_bytes() == CONTENT
    assert len(caplog.messages) == 1
    assert find_weights(tiny) == path
    before, stamp = len(server.requests), path.parent.stat().st_mtime_ns
    assert fetch_weights(tiny, retry_policy=QUICK) == path
    assert len(server.requests) == before
    assert len(caplog.messages) == 1
    # Without a lock file: the folder's time is unchanged (root could write anywhere).
    assert path.parent.stat().st_mtime_ns == stamp


def test_without_network_the_hint_names_the_file_and_its_folder(tiny: str, tmp_path: Path) -> None:
    with Server() as stopped:
        nowhere = stopped.url
    with pytest.raises(NetworkError) as error:
        fetch_weights(tiny, mirror=nowhere, retry_policy=QUICK)
    hint = error.value.hint or ""
    assert f"/models/{STEM}.pth" in hint
    assert str(tmp_path / "torch" / "hub" / "checkpoints" / f"{STEM}.pth") in hint
