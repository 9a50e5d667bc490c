"""The marked blocks of the pages run, and their launches can be planned."""

import subprocess
from pathlib import Path

import pytest
from conftest import Cli
from pages import ROOT, blocks, every_page, whole_commands, words_of


@every_page
def test_launches_can_be_planned(page: Path, tmp_path: Path, cli: Cli) -> None:
    """For real, but for Kubernetes, where the reader's own settings are missing."""
    (tmp_path / "hosts").write_text("a slots=8\nb slots=8\n")
    for text in whole_commands(page):
        words = words_of(text)
        if words[0] == "launch" and not {"kubernetes", "voyager"} & set(words):
            result = cli("launch", "--dry-run", *words[1:])
            assert result.code == 0, (text, result.err)
            assert "ssdctl" in result.out


def run_page(page: Path, folder: Path, cli: Cli) -> None:
    """Run and write the marked blocks of a page, in order."""
    marked = [block for block in blocks(page) if block.mark]
    assert marked
    for block in marked:
        if block.mark != "run":
            path = folder / block.mark.partition(": ")[2]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
        elif block.kind == "python":
            exec(compile(block.text, str(page), "exec"), {})
        else:
            for line in filter(None, block.lines()):
                if line.startswith("ssdctl "):
                    result = cli(*words_of(line))
                    # doctor exits 2 where this machine lacks something.
                    allowed = (0, 2) if line == "ssdctl doctor" else (0,)
                    assert result.code in allowed, (line, result.err)
                else:
                    subprocess.run(["bash", "-ec", line], check=True, cwd=folder)


IN_CI = pytest.mark.slow(in_ci=True)
MADE = "runs/shapes/report.html shapes.safetensors drawn/*.jpg"
OWN = "boxes.png evaluation/report.html drawn/detections.json"


@pytest.mark.parametrize(
    ("page", "made"),
    [
        pytest.param("quickstart", MADE, marks=IN_CI),
        pytest.param("custom-dataset", OWN, marks=IN_CI),
        pytest.param("python", "run/report.html drawn.png", marks=pytest.mark.slow),
        pytest.param("pytorch", "", marks=pytest.mark.slow),
    ],
)
def test_the_blocks_of_a_page(page: str, made: str, tmp_path: Path, cli: Cli) -> None:
    if page == "pytorch":
        pytest.importorskip("accelerate")
    run_page(ROOT / "docs" / f"{page}.md", tmp_path, cli)
    for pattern in made.split():
        assert list(tmp_path.glob(pattern)), pattern


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # they are not committed
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    data = [output["data"] for output in outputs if "data" in output]
    images = [entry for entry in data if "image/png" in entry]
    assert len(images) == 2  # the loss and the detections
    assert any("'val': " in entry.get("text/plain", "") for entry in data)
    text = "".join(output.get("text", "") for output in outputs)
    assert "40/40" in text + str(data)  # a progress bar, of text without ipywidgets
    assert "Warning" not in text


@pytest.mark.slow
def test_images_of_the_readme(tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines run as written on 50 labeled images; only weights and length differ."""
    sizes = ("--images", 50, "--val-images", 2)
    assert cli("download", "--dataset", "shapes", "--dest", "shapes", *sizes).code == 0
    assert cli("dataset", "export", "shapes", "--to", "yolo", "--out", "exported").code == 0
    for kind in ("images", "labels"):
        (tmp_path / "exported" / kind / "val").rename(tmp_path / f"new-{kind}")
    (tmp_path / "exported").rename(tmp_path / "photos")
    (tmp_path / "photos" / "data.yaml").unlink()
    (tmp_path / "photos" / "classes.txt").write_text("ball\nbrick\ncone\nstar\nring\n")
    (tmp_path / "new-images").rename(tmp_path / "new")
    monkeypatch.setenv("SSDCTL_MODEL__WEIGHTS", "none")
    monkeypatch.setenv("SSDCTL_TRAIN__STEPS", "2")
    monkeypatch.setenv("SSDCTL_TRAIN__LR", "1e-5")  # from random weights
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Your own images")[2]
    lines = [line for line in section.partition("\n## ")[0].splitlines() if line[:7] == "ssdctl "]
    assert len(lines) == 4
    for line in lines:
        result = cli(*words_of(line))
        assert result.code == 0, (line, result.err)
    assert len(list((tmp_path / "drawn").glob("*.jpg"))) == 2
    assert (tmp_path / "detector.onnx").is_file()
