"""`--mllog` passes MLPerf's own compliance checker for SSD (training 1.0), if it is installed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY_RUN, Cli, run_cli

# 7 images in batches of 2: the epochs end with steps 3, 7 and 10.
OPTIONS = [*TINY_RUN.split(), "--limit-train", 7, "--epochs", 3, "--decay-epochs", "40,50"]

needs_checker = pytest.mark.skipif(
    importlib.util.find_spec("mlperf_logging") is None, reason="mlperf-logging is not installed"
)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in path.read_text().splitlines()]


def complaints(path: Path) -> str:
    """Return what MLPerf's compliance checker has against a log; empty if it is compliant."""
    command = [sys.executable, "-m", "mlperf_logging.compliance_checker", str(path)]
    options = ["--usage", "training", "--ruleset", "1.0.0", "--log_output", f"{path}.check"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return "" if done.returncode == 0 else Path(f"{path}.check").read_text() + done.stderr


@pytest.fixture(scope="module")
def log(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("logged")
    path = folder / "result_0.txt"
    result = run_cli(
        "train", "--data", shapes, "--out", folder / "run", *OPTIONS, "--eval-at", 1, "--seed", 9,
        "--mllog", path,
    )  # fmt: skip
    assert result.code == 0, result.err
    return path


@needs_checker
def test_complies_with_the_rules_of_both_divisions(log: Path) -> None:
    assert complaints(log) == ""
    closed = log.with_name("closed.txt")
    closed.write_text(log.read_text().replace('"open"', '"closed"'))
    report = complaints(closed)
    # The keys of the closed division are there; the run did not reach its AP of 0.230.
    assert "Failed checks for eval_accuracy" in report
    assert "CHECK for" not in report
    assert "Required" not in report


def test_epochs_and_blocks_surround_the_training(log: Path) -> None:
    events = lines_of(log)
    intervals = [
        (line["key"], line["metadata"].get("epoch_num", line["metadata"].get("first_epoch_num")))
        for line in events
        if line["event_type"] != "POINT_IN_TIME" and not line["key"].startswith(("init", "run"))
    ]
    # Scoring continues while the next block trains: `eval_stop` has no fixed place.
    assert [i for i in intervals if i[0] != "eval_stop"] == [
        ("block_start", 1), ("epoch_start", 1), ("epoch_stop", 1), ("block_stop", 1),
        ("eval_start", 1),
        ("block_start", 2), ("epoch_start", 2), ("epoch_stop", 2), ("epoch_start", 3),
        ("epoch_stop", 3), ("block_stop", 2), ("eval_start", 3),
    ]  # fmt: skip
    assert [i for i in intervals if i[0] == "eval_stop"] == [("eval_stop", 1), ("eval_stop", 3)]
    counts = [x["metadata"]["epoch_count"] for x in events if x["key"] == "block_start"]
    assert counts == [1, 2]
    values = {line["key"]: line["value"] for line in events}
    assert values["seed"] == 9
    assert (values["model_bn_span"], values["max_samples"]) == (2, 1)
    assert values["opt_learning_rate_warmup_factor"] == 0
    assert values["opt_learning_rate_decay_boundary_epochs"] == [40, 50]


def test_the_log_of_a_resumed_run_continues(cli: Cli, shapes: Path, tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    options = ["train", "--data", shapes, "--out", "run", *OPTIONS, "--mllog", path]
    assert cli(*options, "--steps", 4).code == 0
    assert cli(*options, "--target-ap", 0.9).code == 0
    ends = [x["metadata"]["status"] for x in lines_of(path) if x["key"] == "run_stop"]
    assert ends == ["success", "aborted"]  # without the target, and with one that it missed
    keys = [line["key"] for line in lines_of(path)]
    assert keys.count("seed") == 1
    assert [k for k in keys if k.startswith("run_")] == ["run_start", "run_stop"] * 2
    starts = [x["metadata"]["epoch_num"] for x in lines_of(path) if x["key"] == "epoch_start"]
    assert starts == [1, 2, 2, 3]
