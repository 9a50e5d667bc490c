"""Install ssdctl next to an image's own packages, without replacing any of them.

    python3 pod_install.py FOLDER SOURCE

makes a virtual environment in FOLDER that sees the packages of this interpreter, and installs
SOURCE into it. torch and related packages are pinned to the image's versions:
if SOURCE needs others, pip fails instead of replacing the vendor's. Runs as it is in a pod's first
container, before ssdctl is there: it uses only the standard library.
"""

import re
import signal
import site
import subprocess
import sys
from importlib import metadata
from pathlib import Path

KEPT = re.compile(r"(torch|numpy|triton|habana|nvidia|libtpu|jax)", re.IGNORECASE)


def main(folder: str, source: str) -> None:
    options = ["--system-site-packages", "--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *options, folder], check=True)
    # Where this interpreter is one of a virtual environment itself, its packages count too.
    # (sysconfig names this folder from Python 3.11 on; images still bring 3.10.)
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


if __name__ == "__main__":
    # A container's first process ignores SIGTERM without a handler, and would wait to be killed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    main(*sys.argv[1:])
