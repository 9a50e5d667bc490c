"""Install ssdctl in addition to an image's own packages, without replacing any of them.

    python3 pod_install.py FOLDER SOURCE [COMMAND ...]

creates a virtual environment in FOLDER that includes the packages of this interpreter, and installs
SOURCE into it; then it becomes COMMAND, if there is one. torch and related packages are pinned to
the image's versions: if SOURCE needs others, pip fails instead of replacing the vendor's. Runs in a
pod before ssdctl is installed: it uses only the standard library.
"""

import os
import re
import signal
import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path

KEPT = re.compile(r"(torch|numpy|triton|habana|nvidia|libtpu|jax)", re.IGNORECASE)


def main(folder: str, source: str, *command: str) -> None:
    options = ["--system-site-packages", "--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *options, folder], check=True)
    # If this interpreter belongs to a virtual environment itself, its packages are included too.
    # (sysconfig has this folder from Python 3.11 on; some images have 3.10.)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = Path(folder, "lib", version, "site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in site.getsitepackages()]
    Path(packages, "image.pth").write_text("".join(lines))
    kept: dict[str, str] = {}
    for package in metadata.distributions():
        if KEPT.match(package.name or ""):
            kept.setdefault(package.name, package.version)  # the first one is what is imported
    constraints = Path(folder, "kept.txt")
    constraints.write_text("".join(f"{name}=={kept[name]}\n" for name in sorted(kept)))
    pip = [f"{folder}/bin/python", "-m", "pip", "install", "--no-cache-dir"]
    subprocess.run([*pip, "--constraint", str(constraints), "--", source], check=True)
    if command:
        os.execv(command[0], command)


if __name__ == "__main__":
    # Without a handler, a container's first process ignores SIGTERM until it is killed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main(*sys.argv[1:])
