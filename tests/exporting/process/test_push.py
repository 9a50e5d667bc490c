"""`ssdctl push`: the files, the upload to a loopback Hub, and detection without ssdctl."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import Cli, Result
from download.hub_server import TOKEN, HubServer, open_hub
from download.zips import tree
from PIL import Image

import ssdctl
from ssdctl.checkpoint.file import load_resumable, save_checkpoint
from ssdctl.runs.folder import data_name

# huggingface_hub's, of its HTTP client.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPOSITORY = "acme/shapes-ssd"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with open_hub(tmp_path, monkeypatch) as server:
        yield server


def push(cli: Cli, source: object, *options: object) -> Result:
    return cli("push", source, f"hf://{REPOSITORY}", "--license", "mit", "--json", *options)


def test_a_run_is_pushed_and_used_by_its_name(
    cli: Cli, hub: HubServer, tiny_run: Path, image_file: Path
) -> None:
    pushed = json.loads(push(cli, tiny_run, "--private", "--samples", 0).expect(0).out)
    assert pushed["url"].startswith(f"{hub.url}/{REPOSITORY}/commit/")
    repository = hub.repositories[REPOSITORY]
    assert repository.is_private
    assert set(repository.files) == set(pushed["files"])
    mine, theirs = (
        ssdctl.load(name, device="cpu", score=0.02).predict(image_file)
        for name in (tiny_run, f"hf://{REPOSITORY}")
    )
    assert mine == theirs != []
    repository.is_private, repository.files = False, {}
    push(cli, tiny_run, "--private", "--samples", 0).expect(2, "is public")
    assert not repository.files


def test_files_of_others_are_not_replaced(
    cli: Cli, hub: HubServer, tiny_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ssdctl.exporting.hub.SAMPLE_SCORE", 0.02)
    Path("mine/samples").mkdir(parents=True)
    for file in (Path("mine/README.md"), Path("mine/samples/1.jpg")):
        file.write_text("mine")
        refused = push(cli, tiny_run, "--out", "mine")
        assert (refused.code, file.name in refused.err, file.read_text()) == (2, True, "mine")
        file.unlink()
    for count in (2, 1):
        push(cli, tiny_run, "--out", "mine", "--samples", count).expect(0)
        Path("mine/samples/mine.jpg").touch()
    assert {path.name for path in Path("mine/samples").iterdir()} == {"1.jpg", "mine.jpg"}
    with (card := Path("mine/README.md")).open("a") as file:
        file.write("mine")
    push(cli, tiny_run, "--out", "mine").expect(2, "README.md")
    assert card.read_text().endswith("mine")
    push(cli, "mine").expect(2, "--license")
    Path("mine/LICENSE").touch()
    cli("push", "mine", f"hf://{REPOSITORY}").expect(0)
    assert hub.repositories[REPOSITORY].files == tree(Path("mine"))


def test_the_card(cli: Cli, tiny_run: Path, shapes: Path) -> None:
    options = ("--data-license", "CC0 [see|here]", "--private")
    command = ("push", tiny_run, f"hf://{REPOSITORY}", "--license", "mit", "--out", "card")
    result = cli(*command, *options).expect(0)
    assert "no --license" not in result.err
    assert "ssdctl push card hf://acme/shapes-ssd --private" in result.err
    text = Path("card/README.md").read_text()
    header = yaml.safe_load(text.split("---\n")[1])
    assert header["license"] == "mit"
    records = map(json.loads, (tiny_run / "metrics.jsonl").read_text().splitlines())
    record = next(r for r in records if r["kind"] == "eval")
    value = header["model-index"][0]["results"][0]["metrics"][0]["value"]
    assert value == pytest.approx(record["AP"], abs=1e-4)
    assert "CC0 \\[see\\|here\\]" in text
    assert shapes.name in text
    assert str(shapes.parent) not in text  # paths of this machine
    for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", text):
        with Image.open(Path("card") / name) as image:
            image.verify()
    assert {p.name for p in Path("card").iterdir()} >= {"README.md", "config.json", "model.onnx"}
    common = ("--data", shapes, "--device", "cpu", "--limit", 2, "--json")
    scores = [
        json.loads(cli("evaluate", p, *common).out)
        for p in (tiny_run / "checkpoints/last.pt", "card")
    ]
    assert scores[0]["detections"] == scores[1]["detections"] > 0
    assert scores[0]["AP"] == scores[1]["AP"]


def test_the_cards_class_ap_is_of_its_checkpoint(cli: Cli, tiny_run: Path) -> None:
    run = Path("run")
    shutil.copytree(tiny_run, run)
    with (run / "metrics.jsonl").open("a") as file:
        for step, ap in ((3, 0.123), (9, 0.987)):
            common = {"step": step, "epoch": 1.0}
            print(
                json.dumps({"kind": "eval", **common, "AP": ap, "AP50": ap, "AP75": ap}), file=file
            )
            event = {"kind": "event", "event": "class_ap", **common, "AP": {"ball": ap}}
            print(json.dumps(event), file=file)
    last = run / "checkpoints/last.pt"
    checkpoint = load_resumable(last)
    config = {**checkpoint.config, "train.fold": "1/3", "data.tile": 200, "data.tile_overlap": 0.3}
    last.unlink()
    save_checkpoint(last, dataclasses.replace(checkpoint, config=config))
    push(cli, last, "--out", "card", "--samples", 0).expect(0)
    text = Path("card/README.md").read_text()
    assert "| ball | 0.123 |" in text
    assert "metrics on fold 1/3 of" in text
    assert "in tiles of 200 pixels, which overlap by 0.3," in text
    assert "model-index" in text
    config = {**checkpoint.config, "train.overfit": 4}  # scored on its training images
    save_checkpoint(last, dataclasses.replace(checkpoint, config=config))
    push(cli, last, "--out", "card", "--samples", 0).expect(0)
    text = Path("card/README.md").read_text()
    assert ("--overfit 4`: they say nothing" in text, "model-index" in text) == (True, False)


def test_the_data_of_a_run_is_named() -> None:
    settings = {"data.root": "/a/photos", "train.overfit": None, "train.fake_data": False}
    assert data_name(settings) == "photos"
    assert data_name({**settings, "train.overfit": 4}) == "photos (--overfit 4)"
    assert data_name({**settings, "train.fake_data": True}) == "fake"
    assert data_name({}) == ""


def test_the_snippet_detects_without_ssdctl(cli: Cli, tiny_run: Path, image_file: Path) -> None:
    """The code in the card, in a process that can import neither ssdctl nor torch."""
    assert push(cli, tiny_run, "--out", "card", "--samples", 0).code == 0
    snippet = re.findall(r"```python\n(.*?)```", Path("card/README.md").read_text(), re.DOTALL)[0]
    assert "score > 0.3" in snippet
    snippet = snippet.replace("score > 0.3", "score > 0").replace("round(float(score), 3)", "score")
    Path("card/street.jpg").write_bytes(image_file.read_bytes())
    code = "import sys; sys.modules['ssdctl'] = sys.modules['torch'] = None\n" + snippet
    done = subprocess.run(
        [sys.executable, "-c", code], cwd="card", check=True, capture_output=True, text=True
    )
    expected = ssdctl.load(tiny_run, device="cpu", score=0.05).predict(image_file)
    rows = [re.fullmatch(r"(.+) ([\d.e-]+) \[(.*)\]", line) for line in done.stdout.splitlines()]
    actual = [(row[1], float(row[2]), *map(float, row[3].split(","))) for row in rows if row]
    assert len(actual) == len(rows) == len(expected) > 0
    for d in expected:  # rounding decides about the order of almost equal scores
        assert any(
            other[0] == d.name
            and abs(other[1] - d.score) < 1e-3
            and np.allclose(other[2:], d.box, atol=2)
            for other in actual
        ), (d, actual)


def test_refusals_do_not_show_the_token(
    cli: Cli, hub: HubServer, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_another")
    result = push(cli, checkpoint, "--samples", 0).expect(2, "HF_TOKEN")
    assert "hf_another" not in result.err
    assert TOKEN not in result.err
    assert not hub.repositories
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    hub.fails_at = "/lfs/"
    push(cli, checkpoint, "--samples", 0).expect(4)
    assert not hub.repositories[REPOSITORY].files
    hub.status = 500
    assert push(cli, checkpoint, "--samples", 0).code == 4
    cli("push", checkpoint, "acme/shapes-ssd").expect(2, "hf://")
