"""environment.json: versions, device and command of a run, and where its settings came from."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec

from ssdctl.errors import DataError
from ssdctl.files import DECODE_ERRORS, read_limited, reason_of, write_bytes
from ssdctl.runtime.packages import package_version
from ssdctl.runtime.safe_text import redact_arguments

MAX_BYTES = 1 << 20
GIT_S = 10.0  # seconds that git may take
PACKAGES = ("ssdctl", "torch", "torchvision", "numpy", "pillow", "pyarrow", "hotcoco")


class Environment(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a start of training ran on."""

    python: str
    platform: str
    device: str
    world_size: int
    packages: dict[str, str | None]  # version by name; None: not installed
    command: Annotated[list[str], msgspec.Meta(min_length=1)]
    sources: dict[str, str]  # of the settings that are neither a preset's nor a default, by path
    folder: str = ""  # the working folder; empty if it had been deleted
    git_commit: str | None = None  # of the working folder


def find_environment(device: str, world_size: int, sources: Mapping[str, str]) -> Environment:
    """Return the environment of this process, without secrets.

    Args:
        device: Its label.
        sources: See `Environment`.
    """
    return Environment(
        python=sys.version.split()[0],
        platform=platform.platform(),
        device=device,
        world_size=world_size,
        packages={name: package_version(name) for name in PACKAGES},
        command=[_utf8(word) for word in redact_arguments(sys.argv)],
        sources={path: _utf8(label) for path, label in sources.items()},
        folder=_utf8(_working_folder()),
        git_commit=git_commit(),
    )


def _working_folder() -> str:
    try:
        return str(Path.cwd())
    except OSError:
        return ""


def _utf8(text: str) -> str:
    """Replace the stand-ins for bytes of names that are not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def git_commit(folder: Path = Path()) -> str | None:
    """Return the git commit of a folder; None if it is not in a repository."""
    words = ["git", "-C", str(folder), "-c", "core.fsmonitor="]
    words += ["rev-parse", "--verify", "--quiet", "HEAD"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=GIT_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def write_environment(path: Path, environment: Environment) -> None:
    write_bytes(path, msgspec.json.format(msgspec.json.encode(environment), indent=2) + b"\n")


def read_environment(path: Path) -> Environment:
    try:
        return msgspec.json.decode(read_limited(path, MAX_BYTES), type=Environment)
    except (OSError, *DECODE_ERRORS) as error:
        raise DataError(
            f"{path}: not the environment of a run: {reason_of(error)}".replace("`", ""),
            hint="the next start of its training writes it again",
        ) from None
