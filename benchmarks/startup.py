"""Measure the start-up: CPU and wall seconds of short commands, each in a separate process.

    python benchmarks/startup.py [--rounds 3] [--against COMMIT] [--json]

`--against` measures another commit in turn with this working tree, from a temporary git worktree.
Times are the least of all rounds: other work on the machine only adds to them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TRAIN = "train --backbone resnet18 --backbone-weights none --fake-data --bs 1 --warmup 1st"
COMMANDS = {
    "import torch": None,
    "--help": "--help",
    "a TAB after train --pre": "",
    "train --dry-run": f"{TRAIN} --device cpu --steps 1 --dry-run",
    "train --steps 1": f"{TRAIN} --device cpu --steps 1",
    "launch --cpus 2 --steps 1": f"{TRAIN} --steps 1".replace("train", "launch --cpus 2"),
}


def measure(source: Path, name: str) -> tuple[float, float]:
    """Run a command of `COMMANDS` with the package in `source`.

    Returns:
        Its CPU and wall seconds.
    """
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "ssdctl"]
    if name == "import torch":
        command = [sys.executable, "-c", "import torch"]
    elif not COMMANDS[name]:
        environment["_SSDCTL_COMPLETE"] = "complete_zsh"
        environment["_TYPER_COMPLETE_ARGS"] = "ssdctl train --pre"
    with tempfile.TemporaryDirectory() as folder:
        command += (COMMANDS[name] or "").split()
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(command, env=environment, cwd=folder, capture_output=True, check=True)
        wall, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, wall


@contextlib.contextmanager
def worktree(commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "-q", "--detach", f"{folder}/tree", commit], check=True)
        try:
            yield Path(folder, "tree")
        finally:
            subprocess.run([*git, "remove", "--force", f"{folder}/tree"], check=True)


def main() -> None:
    """Measure and print a table or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with contextlib.ExitStack() as stack:
        sources = {"now": ROOT}
        if arguments.against:
            sources[arguments.against] = stack.enter_context(worktree(arguments.against))
        results: dict[str, dict[str, dict[str, float]]] = {}
        for name in COMMANDS:
            # One round that does not count: it writes the byte code and fills the page cache.
            rounds = [
                {label: measure(source, name) for label, source in sources.items()}
                for _ in range(arguments.rounds + 1)
            ][1:]
            results[name] = {
                label: {
                    "cpu_s": round(min(r[label][0] for r in rounds), 2),
                    "wall_s": round(min(r[label][1] for r in rounds), 2),
                }
                for label in sources
            }
            if not arguments.json:
                for label, times in results[name].items():
                    print(f"{name:26} {label:10} {times['cpu_s']:6.2f} {times['wall_s']:6.2f}")
    if arguments.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
