"""Write the completion scripts; a test fails if they are stale.

python completions/generate.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FILES = {"ssdctl.bash": "bash", "_ssdctl": "zsh", "ssdctl.fish": "fish"}
# zsh loads the script at the first completion: it completes then, not only from the second one on.
ZSH_FIRST_COMPLETION = """
if [[ $funcstack[1] == _ssdctl ]]; then
  _ssdctl_completion
fi
"""
RUN = "import sys; sys.argv[0] = 'ssdctl'; from ssdctl.cli.main import main; main()"


def script(shell: str) -> str:
    """Return the completion script for a shell: typer's, complete for zsh."""
    environment = {**os.environ, "_SSDCTL_COMPLETE": f"source_{shell}"}
    command = [sys.executable, "-c", RUN]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    text = result.stdout.strip() + "\n"  # zsh requires #compdef on the first line
    return text + ZSH_FIRST_COMPLETION if shell == "zsh" else text


if __name__ == "__main__":
    for name, shell in FILES.items():
        (Path(__file__).parent / name).write_text(script(shell), encoding="utf-8")
