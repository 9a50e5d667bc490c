"""Two runs in one folder at once: the second one is refused, a dead one is in nobody's way."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import TINY_RUN, Result

from ssdctl.errors import UsageError
from ssdctl.runs import lock
from ssdctl.runs.lock import LOCK, exclusive_run

Cli = Callable[..., Result]


def never(words: str) -> None:
    pytest.fail(words)


def test_a_second_run_is_refused(
    cli: Cli, shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "PATIENCE_S", 0.1)
    out = tmp_path / "run"
    train = ["train", "--data", shapes, "--out", out, "--steps", 1, *TINY_RUN.split()]
    with exclusive_run(out, never, never):
        refused = cli(*train)
        assert refused.code == 2, refused.err
        assert f"{out}: another ssdctl trains there (process " in refused.err
        assert "Traceback" not in refused.err
        assert [p.name for p in out.iterdir()] == [LOCK]
    assert not out.exists()  # nothing came of it
    assert cli(*train, "--resume", "never").code == 0
    assert not (out / LOCK).exists()


def test_a_refused_start_leaves_no_folder(cli: Cli, shapes: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--init", tmp_path / "none.pt", "--steps", 1, *TINY_RUN.split()]
    assert cli("train", "--data", shapes, "--out", out, *options).code != 0
    assert not out.exists()


def test_one_that_ends_is_waited_for(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from ssdctl.runs.lock import exclusive_run\n"
        f"with exclusive_run(Path({str(tmp_path)!r}), print, print): print('in', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "in\n"
    told = threading.Event()
    killer = threading.Thread(target=lambda: (told.wait(30), holder.kill()))
    killer.start()
    with exclusive_run(tmp_path, lambda _: told.set(), never):
        assert told.is_set()
        assert (tmp_path / LOCK).read_text().endswith(f" on {socket.gethostname()}")
    killer.join()
    holder.communicate()


def test_another_machines_lock_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of a node that is gone, and the run must go on elsewhere."""
    monkeypatch.setattr(lock, "PATIENCE_S", 0.1)
    warned: list[str] = []
    with exclusive_run(tmp_path, never, never):
        (tmp_path / LOCK).write_text("7 on elsewhere")
        with exclusive_run(tmp_path, lambda _: None, warned.append):
            assert "process 7 on elsewhere seems to train there too" in warned[0]
        assert (tmp_path / LOCK).exists()
        (tmp_path / LOCK).write_text(f"7 on {socket.gethostname()}")
        with pytest.raises(UsageError), exclusive_run(tmp_path, lambda _: None, never):
            pass
