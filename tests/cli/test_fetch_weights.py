"""`ssdctl fetch-weights` as users type it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from download.http_server import Server, file

import ssdctl.cli.fetch_weights  # noqa: F401 - registers the command
from ssdctl.cli.main import main
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


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Return (exit code, stdout, stderr) of `ssdctl fetch-weights ...`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["fetch-weights", *arguments])
    output = capsys.readouterr()
    return int(end.value.code or 0), output.out, output.err


def test_the_default_is_the_weights_of_the_preset(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(resnet34.WEIGHTS, "imagenet-v1", tiny.WEIGHTS["v1"])
    code, out, _ = run(capsys, "--json")
    assert (code, json.loads(out)["alias"]) == (0, "resnet34-imagenet-v1")


@pytest.mark.process
def test_the_path_is_the_result(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "torch" / "hub" / "checkpoints" / f"{STEM}.pth"
    code, out, _ = run(capsys, "tiny-v1")
    assert (code, out) == (0, f"{path}\n")
    assert path.read_bytes() == CONTENT
    code, out, _ = run(capsys, STEM, "--dest", "here", "--json")
    assert json.loads(out) == {
        "name": STEM,
        "alias": "tiny-v1",
        "path": f"here/{STEM}.pth",
        "bytes": len(CONTENT),
        "sha256": DIGEST,
    }


@pytest.mark.process
def test_the_default_follows_the_config(capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ("--set", "model.backbone=tiny", "--set", "model.weights=tiny-v1")
    assert run(capsys, *tiny)[0] == 0
    code, _, err = run(capsys, "--set", "model.weights=none")
    assert (code, "--list" in err) == (2, True)


@pytest.mark.process
def test_the_list_shows_which_files_are_present(capsys: pytest.CaptureFixture[str]) -> None:
    def paths() -> dict[str, str | None]:
        listed = json.loads(run(capsys, "--list", "--json")[1])["weights"]
        return {row["name"]: row["path"] for row in listed}

    assert set(paths().values()) == {None}
    run(capsys, STEM)
    assert [path for path in paths().values() if path] == [paths()[STEM]]
    code, out, _ = run(capsys, "--list")
    assert (code, "tiny-v1" in out) == (0, True)


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "tinyv1")
    assert (code, "did you mean 'tiny-v1'?" in err) == (2, True)
    assert run(capsys, STEM, "--list")[0] == 2


def test_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    with Server() as stopped:
        nowhere = stopped.url
    code, out, err = run(capsys, STEM, "--mirror", nowhere, "--json")
    assert (code, out) == (4, "")
    assert "without network" in err


def test_other_bytes(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.route(f"/{STEM}.pth", file(CONTENT[::-1]))
    assert run(capsys, STEM, "--mirror", server.url)[0] == 5


def test_training_without_network_names_a_remedy(
    shapes: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server() as stopped:
        monkeypatch.setenv("SSDCTL_DOWNLOAD__MIRROR", stopped.url)
    options = "--backbone tiny --backbone-weights tiny-v1 --device cpu --bs 2 --steps 1"
    with pytest.raises(SystemExit) as end:
        main(["train", "--data", str(shapes), "--out", "run", *options.split(), "--warmup", "1st"])
    err = capsys.readouterr().err
    assert end.value.code == 4, err
    assert err.count("fetching http") == 1
    assert f"{STEM}.pth on another machine and put it at" in err
