"""`ssdctl download` and `fetch-weights` as users type them, against a server on the loopback."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli
from download.http_server import Server, file
from download.zips import tree, zipped

from ssdctl.download import pinned_files
from ssdctl.download.fetch import SPARE_BYTES
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.model.backbones.resnet import resnet34, tiny

CONTENT = {f"val2017/{i:06d}.jpg": random.Random(i).randbytes(500) for i in range(30)}
ARCHIVE = zipped(CONTENT)
WEIGHTS = bytes(range(256)) * 100
DIGEST = hashlib.sha256(WEIGHTS).hexdigest()
STEM = f"tiny-{DIGEST[:8]}"


def manifest(url: str, content: bytes = ARCHIVE, name: str = "val.zip", more: str = "") -> str:
    digest = hashlib.sha256(content).hexdigest()
    path = Path("manifest.toml")
    path.write_text(
        f'[[file]]\nname = "{name}"\nurl = "{url}"\nbytes = {len(content)}\n'
        f'sha256 = "{digest}"\n{more}'
    )
    return str(path)


def answer(cli: Cli, *arguments: str) -> Any:
    code, out, err = cli("download", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_manifest_is_fetched_and_unpacked(
    server: Server, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.route("/m/val.zip", file(ARCHIVE))
    file_list = manifest("https://files.invalid/val.zip", more="unpack = true\n")
    more = ["--connections", "2", "--mirror", f"{server.url}/m", "--keep-archives"]
    result = answer(cli, "--dest", "data", "--manifest", file_list, *more)
    assert result["dest"] == "data"
    assert result["files"][0]["state"] == "fetched"
    assert tree(Path("data/val2017")) == {k.partition("/")[2]: v for k, v in CONTENT.items()}
    assert Path("data/val.zip").read_bytes() == ARCHIVE
    assert answer(cli, "--dest", "data", "--manifest", file_list)["files"][0]["files"] == 30
    code, out, _ = cli("download", "--dest", "data", "--manifest", file_list, "-q")
    assert (code, out) == (0, "val.zip: present, 30 files\n")
    monkeypatch.setitem(
        pinned_files.COCO2017, "val", pinned_files.read_manifest(Path(file_list))[0]
    )
    result = cli("download", "--dest", "data", "--part", "val").expect(0)
    assert "prepare" not in result.err  # there are no labels
    assert not Path("data/val.zip").exists()
    cli("download", "--dest", file_list, "--manifest", file_list).expect(6)


def test_verify(server: Server, cli: Cli) -> None:
    file_list = manifest(server.route("/val.zip", file(ARCHIVE)), more="unpack = true\n")
    options = ["--dest", "data", "--manifest", file_list]
    cli("download", *options, "--verify").expect(5, "val.zip")
    assert cli("download", "--dest", "nothing", "--verify").code == 5  # not a part of COCO
    answer(cli, *options)
    before = len(server.requests)
    assert answer(cli, *options, "--verify")["files"][0]["state"] == "intact"
    image = Path("data/val2017/000003.jpg")
    image.write_bytes(bytes(500))
    result = cli("download", *options, "--verify", "--json").expect(5, "val2017/000003.jpg")
    assert json.loads(result.out)["files"][0]["problems"] == ["val2017/000003.jpg"]
    assert answer(cli, *options, "--dry-run")["files"][0]["state"] == "missing"
    assert len(server.requests) == before


def test_a_dry_run_shows_coco_and_does_nothing(cli: Cli) -> None:
    code, out, err = cli("download", "--dry-run", "--dest", "data", "--json")
    result = json.loads(out)
    has_space = result["free_bytes"] > result["needed_bytes"] + SPARE_BYTES
    assert (code, "are free" in err) == ((0, False) if has_space else (6, True))
    assert [f["bytes"] for f in result["files"]] == [252907541, 815585330, 19336861798]
    assert result["needed_bytes"] > 38e9
    (part,) = answer(cli, "--dry-run", "--part", "val")["files"]
    assert part["url"] == "https://s3.amazonaws.com/images.cocodataset.org/zips/val2017.zip"
    _, out, _ = cli("download", "--dry-run")
    assert ("train2017.zip" in out, "are free" in out) == (True, True)
    assert list(Path().iterdir()) == []


def test_shapes_are_generated(cli: Cli) -> None:
    options = ["--dataset", "shapes", "--images", "3", "--val-images", "2"]
    result = answer(cli, *options, "--dry-run")
    assert list(Path().iterdir()) == []
    result = answer(cli, *options)
    assert (result["dest"], result["train"], result["val"]) == ("data/shapes", 3, 2)
    assert len(list(Path("data/shapes/train2017").iterdir())) == 3
    (annotations := Path("data/shapes/annotations/instances_val2017.json")).unlink()
    annotations.write_text("{}")
    assert cli("download", *options, "--dry-run")[0] == 2


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="root writes to any folder")
def test_a_complete_download_in_a_read_only_folder(server: Server, cli: Cli) -> None:
    """As of an administrator, for all users of a cluster."""
    file_list = manifest(server.route("/val.zip", file(ARCHIVE)), more="unpack = true\n")
    options = ["--dest", "data", "--manifest", file_list]
    answer(cli, *options)
    Path("data/.ssdctl").chmod(0o555)
    Path("data").chmod(0o555)
    user = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all", "--"]
    command = [sys.executable, "-m", "ssdctl", "download", *options]
    if os.geteuid() == 0:
        command = [*user, *command]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "val.zip: present, 30 files\n"), done.stderr
    Path("data/val2017/000003.jpg").write_bytes(bytes(500))
    done = subprocess.run([*command, "--verify"], capture_output=True, text=True, timeout=60)
    Path("data").chmod(0o755)
    assert done.returncode == 5
    assert "val2017/000003.jpg" in done.stderr


@pytest.fixture
def cache(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of cached weights; the server has those of `tiny-v1`."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    url = server.route(f"/models/{STEM}.pth", file(WEIGHTS))
    monkeypatch.setitem(tiny.WEIGHTS, "v1", PinnedFile(f"{STEM}.pth", url, DIGEST))
    return tmp_path / "torch/hub/checkpoints"


def test_weights_by_name_or_config(
    server: Server, cache: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def paths() -> dict[str, str | None]:
        listed = json.loads(cli("fetch-weights", "--list", "--json").out)["weights"]
        return {row["name"]: row["path"] for row in listed}

    assert set(paths().values()) == {None}
    path = cache / f"{STEM}.pth"
    code, out, err = cli("fetch-weights", "tiny-v1")
    assert (code, out) == (0, f"{path}\n")
    assert "--backbone-weights tiny-v1 --backbone tiny" in " ".join(err.split())
    assert path.read_bytes() == WEIGHTS
    before = len(server.requests), cache.stat().st_mtime_ns
    cli("fetch-weights", STEM).expect(0)
    assert (len(server.requests), cache.stat().st_mtime_ns) == before  # without a lock file
    assert [found for found in paths().values() if found] == [paths()[STEM]]
    assert "tiny-v1" in cli("fetch-weights", "--list").out
    assert f"--backbone-weights here/{STEM}.pth" in cli("fetch-weights", STEM, "--dest", "here").err
    shown = json.loads(cli("fetch-weights", STEM, "--dest", "here", "--json").out)
    assert [*shown.values()] == [STEM, "tiny-v1", f"here/{STEM}.pth", len(WEIGHTS), DIGEST]
    monkeypatch.setitem(resnet34.WEIGHTS, "imagenet-v1", tiny.WEIGHTS["v1"])
    own = ("--set", "model.backbone=tiny", "--set", "model.weights=tiny-v1")
    for options, alias in (((), "resnet34-imagenet-v1"), (own, "tiny-v1")):
        result = cli("fetch-weights", "--json", *options)
        assert (result.code, json.loads(result.out)["alias"]) == (0, alias)


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--set", "model.weights=none"], 2, "--list"),
        (["tinyv1"], 2, "'tiny-v1'"),
        (["hf://org/name"], 2, "hf://org/name: is a path or a URL"),
        ([STEM, "--list"], 2, "--list"),
        ([STEM, "--mirror", "http://127.0.0.1:1"], 4, "without network"),
        ([STEM, "--mirror", "SERVER"], 5, f"{STEM}.pth"),
    ],
)
@pytest.mark.usefixtures("cache")
def test_weights_that_cannot_be_fetched(
    server: Server, cli: Cli, arguments: list[str], code: int, named: str
) -> None:
    server.route(f"/{STEM}.pth", file(WEIGHTS[::-1]))
    result = cli("fetch-weights", *(a.replace("SERVER", server.url) for a in arguments), "--json")
    assert (result.code, result.out, named in result.err) == (code, "", True), result.err


@pytest.mark.usefixtures("cache")
def test_training_without_network_names_a_remedy(shapes: Path, cli: Cli) -> None:
    options = "--backbone tiny --backbone-weights tiny-v1 --device cpu --steps 1 --warmup 1st"
    mirror = ("--set", "download.mirror=http://127.0.0.1:1")
    code, _, err = cli("train", "--data", shapes, "--out", "run", *options.split(), *mirror)
    assert code == 4, err
    assert err.count("fetching http") == 1
    for named in (f"{STEM}.pth", "--backbone-weights none", "--init"):
        assert named in err
