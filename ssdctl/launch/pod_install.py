"""Put ssdctl beside an image's own packages, none of which is replaced.

    python3 pod_install.py FOLDER SOURCE

makes a virtual environment in FOLDER that sees the packages of this interpreter, and installs
SOURCE into it. torch and its kin are pinned to what the image has: where SOURCE wants others, pip
fails instead of replacing the vendor's. Runs as it is in a pod's first container, before ssdctl is
there: the standard library alone.
"""

import re
import site
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

KEPT = re.compile(r"(torch|numpy|triton|habana|nvidia|libtpu|jax)", re.IGNORECASE)


def main(folder: str, source: str) -> None:
    options = ["--system-site-packages", "--without-pip"]
    subprocess.run([sys.executable, "-m", "venv", *options, folder], check=True)
    # Where this interpreter is one of a virtual environment itself, its packages count too.
    packages = sysconfig.get_path("purelib", "venv", {"base": folder, "platbase": folder})
    Path(packages, "image.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    constraints = Path(folder, "kept.txt")
    pins = {f"{d.name}=={d.version}" for d in metadata.distributions() if KEPT.match(d.name or "")}
    constraints.write_text("".join(f"{pin}\n" for pin in sorted(pins)))
    pip = [f"{folder}/bin/python", "-m", "pip", "install", "--no-cache-dir"]
    subprocess.run([*pip, "--constraint", str(constraints), "--", source], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
