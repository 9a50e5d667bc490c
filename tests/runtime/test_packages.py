"""What is read from the installed PyTorch's metadata, and what differs between its versions."""

from pathlib import Path

import pytest

from ssdctl.runtime import packages


@pytest.mark.parametrize(
    ("version", "requires", "extra"),
    [
        ("2.6.0", "nvidia-cuda-runtime-cu12==12.4.127", "dali-cuda12"),
        ("2.6.0a0+git51b4c8b", "sympy", "dali-cuda13"),
        ("2.9.1+cu128", "sympy", "dali-cuda12"),
        ("2.15.0", "cuda-toolkit==13.2.2", "dali-cuda13"),
        ("2.7.0", "", "dali-cuda13"),
    ],
)
def test_the_installed_release_and_its_cuda(
    version: str, requires: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"torch-{version}.dist-info"
    folder.mkdir()
    text = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
    (folder / "METADATA").write_text(text + (requires and f"Requires-Dist: {requires}\n"))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert packages.torch_release() == tuple(map(int, version.split(".")[:2]))
    assert packages.dali_extra() == extra
    assert packages.dali_package() == f"nvidia-{extra}0"
