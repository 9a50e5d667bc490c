"""Gaudi, with a recording fake of the bridge (tests/standin): no card was available."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ssdctl.device import hpu

STANDIN = Path(__file__).parents[2] / "standin"


AUTOLOAD = """
import subprocess
import sys
{imports}
print("habana_frameworks.torch.core" in sys.modules)
from ssdctl.device import hpu, open_device
from ssdctl.errors import UsageError

hpu.TORCH_DEVICE = "cpu"
try:
    print(open_device("hpu", execution="compile").execution)
except UsageError as error:
    print("refused", error)
"""


@pytest.mark.parametrize(
    ("imports", "loaded", "opened"),
    [("import ssdctl, torch", "False", "compile"), ("import torch", "True", "refused")],
)
def test_the_bridge_is_not_loaded_before_its_mode_is_set(
    tmp_path: Path, imports: str, loaded: str, opened: str
) -> None:
    variables = {k: v for k, v in os.environ.items() if k not in (hpu.MODE, "PT_HPU_AUTOLOAD")}
    path = os.pathsep.join([str(STANDIN), os.environ.get("PYTHONPATH", ""), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", AUTOLOAD.format(imports=imports)],
        env={**variables, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    lines = done.stdout.splitlines()
    assert [lines[0], lines[1].split()[0]] == [loaded, opened], done.stderr
