"""Write the completion scripts; a test fails when they are stale.

python completions/generate.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = {"ssdctl.bash": "bash", "_ssdctl": "zsh", "ssdctl.fish": "fish"}
RUN = "import sys; sys.argv[0] = 'ssdctl'; from ssdctl.cli.main import main; main()"


def script(shell: str) -> str:
    """What the program gives a shell that asks it for completion."""
    environment = {**os.environ, "_SSDCTL_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return done.stdout.strip() + "\n"  # zsh wants #compdef on the first line


if __name__ == "__main__":
    for name, shell in FILES.items():
        (Path(__file__).parent / name).write_text(script(shell), encoding="utf-8")
