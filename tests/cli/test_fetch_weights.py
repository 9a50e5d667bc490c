"""`ssdctl fetch-weights` as users type it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Result
from download.http_server import Server, file

from ssdctl.download.pinned_files import PinnedFile
from ssdctl.model.backbones import resnet34, tiny

Cli = Callable[..., Result]
CONTENT = bytes(range(256)) * 100
DIGEST = hashlib.sha256(CONTENT).hexdigest()
STEM = f"tiny-{DIGEST[:8]}"


@pytest.fixture(autouse=True)
def _tiny(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    url = server.route(f"/models/{STEM}.pth", file(CONTENT))
    monkeypatch.setitem(tiny.WEIGHTS, "v1", PinnedFile(f"{STEM}.pth", url, DIGEST))


def test_the_default_is_the_weights_of_the_preset(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(resnet34.WEIGHTS, "imagenet-v1", tiny.WEIGHTS["v1"])
    code, out, _ = cli("fetch-weights", "--json")
    assert (code, json.loads(out)["alias"]) == (0, "resnet34-imagenet-v1")


def test_the_path_is_the_result(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "torch" / "hub" / "checkpoints" / f"{STEM}.pth"
    code, out, _ = cli("fetch-weights", "tiny-v1")
    assert (code, out) == (0, f"{path}\n")
    assert path.read_bytes() == CONTENT
    code, out, _ = cli("fetch-weights", STEM, "--dest", "here", "--json")
    assert json.loads(out) == {
        "name": STEM,
        "alias": "tiny-v1",
        "path": f"here/{STEM}.pth",
        "bytes": len(CONTENT),
        "sha256": DIGEST,
    }


def test_the_default_follows_the_config(cli: Cli) -> None:
    tiny = ("--set", "model.backbone=tiny", "--set", "model.weights=tiny-v1")
    assert cli("fetch-weights", *tiny)[0] == 0
    code, _, err = cli("fetch-weights", "--set", "model.weights=none")
    assert (code, "--list" in err) == (2, True)


def test_the_list_shows_which_files_are_present(cli: Cli) -> None:
    def paths() -> dict[str, str | None]:
        listed = json.loads(cli("fetch-weights", "--list", "--json")[1])["weights"]
        return {row["name"]: row["path"] for row in listed}

    assert set(paths().values()) == {None}
    cli("fetch-weights", STEM)
    assert [path for path in paths().values() if path] == [paths()[STEM]]
    code, out, _ = cli("fetch-weights", "--list")
    assert (code, "tiny-v1" in out) == (0, True)


def test_usage(cli: Cli) -> None:
    code, _, err = cli("fetch-weights", "tinyv1")
    assert (code, "'tiny-v1'" in err) == (2, True)
    assert cli("fetch-weights", STEM, "--list")[0] == 2


def test_no_network(cli: Cli) -> None:
    with Server() as stopped:
        nowhere = stopped.url
    code, out, err = cli("fetch-weights", STEM, "--mirror", nowhere, "--json")
    assert (code, out) == (4, "")
    assert "without network" in err


def test_other_bytes(server: Server, cli: Cli) -> None:
    server.route(f"/{STEM}.pth", file(CONTENT[::-1]))
    assert cli("fetch-weights", STEM, "--mirror", server.url)[0] == 5


def test_training_without_network_names_a_remedy(
    shapes: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server() as stopped:
        monkeypatch.setenv("SSDCTL_DOWNLOAD__MIRROR", stopped.url)
    options = "--backbone tiny --backbone-weights tiny-v1 --device cpu --bs 2 --steps 1"
    code, _, err = cli(
        "train", "--data", shapes, "--out", "run", *options.split(), "--warmup", "1st"
    )
    assert code == 4, err
    assert err.count("fetching http") == 1
    assert f"{STEM}.pth" in err
