"""`ssdctl fetch-weights` as users type it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from conftest import Cli
from download.http_server import Server, file

from ssdctl.download.pinned_files import PinnedFile
from ssdctl.model.backbones import resnet34, tiny

CONTENT = bytes(range(256)) * 100
DIGEST = hashlib.sha256(CONTENT).hexdigest()
STEM = f"tiny-{DIGEST[:8]}"


@pytest.fixture(autouse=True)
def _tiny(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    url = server.route(f"/models/{STEM}.pth", file(CONTENT))
    monkeypatch.setitem(tiny.WEIGHTS, "v1", PinnedFile(f"{STEM}.pth", url, DIGEST))


def test_the_default_is_the_weights_of_the_config(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(resnet34.WEIGHTS, "imagenet-v1", tiny.WEIGHTS["v1"])
    own = ("--set", "model.backbone=tiny", "--set", "model.weights=tiny-v1")
    for options, alias in (((), "resnet34-imagenet-v1"), (own, "tiny-v1")):
        code, out, _ = cli("fetch-weights", "--json", *options)
        assert (code, json.loads(out)["alias"]) == (0, alias)


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


def test_the_list_shows_which_files_are_present(cli: Cli) -> None:
    def paths() -> dict[str, str | None]:
        listed = json.loads(cli("fetch-weights", "--list", "--json")[1])["weights"]
        return {row["name"]: row["path"] for row in listed}

    assert set(paths().values()) == {None}
    cli("fetch-weights", STEM)
    assert [path for path in paths().values() if path] == [paths()[STEM]]
    code, out, _ = cli("fetch-weights", "--list")
    assert (code, "tiny-v1" in out) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--set", "model.weights=none"], 2, "--list"),
        (["tinyv1"], 2, "'tiny-v1'"),
        ([STEM, "--list"], 2, "--list"),
        ([STEM, "--mirror", "http://127.0.0.1:1"], 4, "without network"),
        ([STEM, "--mirror", "SERVER"], 5, f"{STEM}.pth"),
    ],
)
def test_failures(server: Server, cli: Cli, arguments: list[str], code: int, named: str) -> None:
    server.route(f"/{STEM}.pth", file(CONTENT[::-1]))
    result = cli("fetch-weights", *(a.replace("SERVER", server.url) for a in arguments), "--json")
    assert (result.code, result.out, named in result.err) == (code, "", True), result.err


def test_training_without_network_names_a_remedy(shapes: Path, cli: Cli) -> None:
    options = (
        "--backbone tiny --backbone-weights tiny-v1 --device cpu --bs 2 --steps 1 --warmup 1st"
    )
    mirror = ("--set", "download.mirror=http://127.0.0.1:1")
    code, _, err = cli("train", "--data", shapes, "--out", "run", *options.split(), *mirror)
    assert code == 4, err
    assert err.count("fetching http") == 1
    for named in (f"{STEM}.pth", "--backbone-weights none", "--init"):
        assert named in err
