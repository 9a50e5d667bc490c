"""Shared fixtures: a small shapes dataset, a tiny trained run, the command line in-process, a web
server."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import pytest
from download.http_server import Server
from hypothesis import HealthCheck, settings

from ssdctl.data.shapes import generate

# Where the suite itself runs in the background, its shell ignores SIGINT, and children inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Two cores are shared by the test workers; more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long an example takes on a loaded machine says nothing; the first one makes Unicode's tables.
settings.register_profile("ssdctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ssdctl")

TINY_RUN = (
    "--backbone resnet18 --backbone-weights none --bs 2 --warmup 1st --log-every 1 --workers 1 "
    "--fp32 --device cpu"
)


class Result(NamedTuple):
    """What a command left: its exit code and its words."""

    code: int
    out: str
    err: str


def run_cli(*arguments: object) -> Result:
    """Run `ssdctl ARGUMENTS` in this process."""
    from ssdctl.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main([str(a) for a in arguments])
        except SystemExit as exit_:
            code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture(autouse=True)
def _clean_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No config file, variable or cache of the machine reaches a test."""
    for name in list(os.environ):
        if name.startswith("SSDCTL_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli() -> Callable[..., Result]:
    return run_cli


@pytest.fixture
def server() -> Iterator[Server]:
    """A web server of this test's own, on the loopback."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 24 training and 9 validation pictures. Read only."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    generate(folder, num_train=24, num_val=9, seed=0)
    return folder


@pytest.fixture(scope="session")
def tiny_run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps, evaluated at its end. Read only."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    result = run_cli("train", "--data", shapes, "--out", run, "--steps", 3, *TINY_RUN.split())
    assert result.code == 0, result.err
    return run


@pytest.fixture(scope="session")
def checkpoint(tiny_run: Path) -> Path:
    """The last checkpoint of the tiny run. Read only."""
    return tiny_run / "checkpoints" / "last.pt"
