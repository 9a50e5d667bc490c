"""Machines that misbehave: no temporary folder, caches of other users, a clock that is set back."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from conftest import Cli

from ssdctl.runtime.system import private_cache_dir

OTHER_USER = 65534


def test_a_temporary_folder_that_does_not_exist(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    result = cli("launch", "--cpus", 1, "--", "models")
    assert result.code == 6
    assert "TMPDIR" in result.err
    assert str(tmp_path / "absent") in result.err
    assert "Traceback" not in result.err


def test_a_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "absent"))
    assert private_cache_dir("a") is None
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = private_cache_dir("a")
    assert folder is not None
    assert folder.is_relative_to(tmp_path)
    assert private_cache_dir("a") == folder
    root = folder.parent
    root.chmod(0o777)
    assert private_cache_dir("a") is None
    root.chmod(0o700)
    root.rename(tmp_path / "mine")
    root.symlink_to(tmp_path / "mine")
    assert private_cache_dir("a") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to other users")
def test_a_cache_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    folder = private_cache_dir("a")
    assert folder is not None
    os.chown(folder.parent, OTHER_USER, OTHER_USER)
    assert private_cache_dir("a") is None
