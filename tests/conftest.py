"""Shared fixtures: a small shapes dataset, a tiny trained run, the command line in-process, a web
server. Markers: see CONTRIBUTING.md."""

from __future__ import annotations

import gc
import importlib
import io
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from download.http_server import Server
from hypothesis import HealthCheck, Phase, given, settings

from ssdctl.data.shapes import generate

# If the suite runs in the background, its shell ignores SIGINT, and nohup ignores SIGHUP; child
# processes inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# torch 2.6's triton imports setuptools, which cannot be loaded after Python's own distutils.
if sys.version_info < (3, 12):
    with warnings.catch_warnings(), suppress(ImportError):
        warnings.simplefilter("ignore")
        importlib.import_module("setuptools")

# Two cores are shared by the test workers; more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The duration of an example depends on the machine's load; the first one builds Unicode tables.
# A change is judged by the same examples everywhere; `--hypothesis-profile random` draws new ones,
# `few` takes a few of them, for further versions of Python and torch.
settings.register_profile("random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ssdctl", settings.get_profile("random"), derandomize=True)
settings.register_profile("few", settings.get_profile("ssdctl"), max_examples=5)
settings.load_profile("ssdctl")
PHASES = [Phase.reuse, Phase.generate, Phase.shrink]  # not `explain`, which takes long

# Variables of a developer's shell, a container or a batch job that change what is tested.
MACHINE_PREFIXES = ("SSDCTL_", "_SSDCTL_", "SLURM_", "OMPI_", "PMIX_")
MACHINE_VARIABLES = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONDONTWRITEBYTECODE", "CUDA_VISIBLE_DEVICES"),
    *("NO_COLOR", "FORCE_COLOR"),
}

TINY_RUN = (
    "--preset stable-r34 --backbone tiny --backbone-weights none --bs 2 --warmup 1st "
    "--log-every 1 --workers 1 --fp32 --device cpu"
)
# The same as keywords, without `log_every`.
TINY: dict[str, Any] = {
    "preset": "stable-r34", "backbone": "tiny", "backbone_weights": "none", "batch_size": 2,
    "warmup": "1st", "workers": 1, "precision": "fp32", "device": "cpu", "progress": False,
}  # fmt: skip


class Result(NamedTuple):
    """The exit code, output and error text of a command."""

    code: int
    out: str
    err: str

    def expect(self, code: int, *words: str) -> Result:
        """Assert the exit code, and that the error text has these words and no traceback."""
        absent = [word for word in words if word not in self.err]
        assert (self.code, absent) == (code, []), self.err
        assert "Traceback" not in self.err, self.err
        return self


Cli = Callable[..., Result]


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


def budgets(small: int, large: int) -> pytest.MarkDecorator:
    """Run a test with few `examples`, and with many new ones as a slow test."""
    return pytest.mark.parametrize("examples", [small, pytest.param(large, marks=pytest.mark.slow)])


def check_all(check: Callable[..., None], examples: int, **strategies: Any) -> None:
    """Call a function with examples of its arguments; over a thousand are new each time."""
    is_large = examples > 1000
    count = examples if is_large else min(examples, settings.default.max_examples)
    settings(max_examples=count, phases=PHASES, derandomize=not is_large)(
        given(**strategies)(check)
    )()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what UTF-8 cannot encode in captured output: xdist's workers send it as UTF-8."""
    report = yield
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode())
        for title, text in report.sections
    ]
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test that is not `slow`: `process` in the folders of that name and in fuzz/, else
    `unit`."""
    # Once fake tensors of another device were used, PyTorch's next backward pass starts threads
    # after which a fork cannot train: tests that fork come first.
    items.sort(key=lambda item: item.path.name in ("test_memory.py", "test_benchmark.py"))
    for item in items:
        if not item.get_closest_marker("slow"):
            folders = item.path.relative_to(Path(__file__).parent).parts
            item.add_marker("process" if {"process", "fuzz"} & {*folders} else "unit")


def pytest_collection_finish() -> None:
    """Leave the imported modules out of garbage collections, which take a quarter of a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    """Let the interpreter free all modules at its end: some report those that it does not."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Isolate every test from the machine's config files and variables."""
    for name in list(os.environ):
        # The fixture of the Slurm tests sets SLURM_CONF to the daemons that it started.
        is_machines = name.startswith(MACHINE_PREFIXES) and name != "SLURM_CONF"
        if is_machines or name in MACHINE_VARIABLES:
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def cli() -> Cli:
    return run_cli


@pytest.fixture
def server() -> Iterator[Server]:
    """Start a web server on the loopback interface, for one test."""
    with Server() as running:
        yield running


@pytest.fixture(scope="session")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a dataset of 24 training and 9 validation images. Read only."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    generate(folder, num_train=24, num_val=9, seed=0)
    return folder


@pytest.fixture(scope="session")
def image_files(shapes: Path) -> list[Path]:
    """Return the validation images of the shapes. Read only."""
    return sorted((shapes / "val2017").iterdir())


@pytest.fixture(scope="session")
def image_file(image_files: list[Path]) -> Path:
    return image_files[0]


@pytest.fixture
def dataset(shapes: Path, tmp_path: Path) -> Path:
    """Return a copy of the shapes, not prepared, that a test may change."""
    folder = tmp_path / "dataset"
    return shutil.copytree(shapes, folder, ignore=shutil.ignore_patterns("prepared"))


@pytest.fixture(scope="session")
def tiny_run(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of three steps, evaluated at its end. Read only."""
    run = tmp_path_factory.mktemp("runs") / "tiny"
    result = run_cli("train", "--data", shapes, "--out", run, "--steps", 3, *TINY_RUN.split())
    assert result.code == 0, result.err
    return run


@pytest.fixture(scope="session")
def checkpoint(tiny_run: Path) -> Path:
    """Return the last checkpoint of the tiny run. Read only."""
    return tiny_run / "checkpoints" / "last.pt"


@pytest.fixture
def run(tiny_run: Path, tmp_path: Path) -> Path:
    """Return a copy of the tiny run (three steps of two images); `train` resumes it."""
    return shutil.copytree(tiny_run, tmp_path / "run")
