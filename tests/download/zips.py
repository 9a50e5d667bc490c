"""Archives for tests, the files that a download is asked for, and the contents of a folder."""

import hashlib
import io
import subprocess
import sys
import zipfile
from pathlib import Path

from download.http_server import Server, file

from ssdctl.download.pinned_files import PinnedFile


def zipped(content: dict[str, bytes], **fields: object) -> bytes:
    """Return a zip of `content`; `fields` are set in the header of each entry."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for name, data in content.items():
            info = zipfile.ZipInfo(name)
            for field, value in {"compress_type": zipfile.ZIP_DEFLATED, **fields}.items():
                setattr(info, field, value)
            opened.writestr(info, data)
    return buffer.getvalue()


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`: path -> content."""
    files = (p for p in folder.rglob("*") if not p.is_dir())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def pinned(
    server: Server, name: str, content: bytes, *, unpack: bool = False, pause_s: float = 0
) -> PinnedFile:
    url = server.route(f"/{name}", file(content, pause_s=pause_s))
    return PinnedFile(name, url, hashlib.sha256(content).hexdigest(), len(content), unpack)


def content(dest: Path) -> dict[str, bytes]:
    """The files in `dest`, except for its records."""
    return {name: data for name, data in tree(dest).items() if not name.startswith(".ssdctl/")}


def start_download(
    pin: PinnedFile, dest: Path, connections: int = 8, before: str = ""
) -> subprocess.Popen[str]:
    """Download one file in a process, which prints `go`, and the state at its end."""
    program = f"""{before}
from pathlib import Path
from ssdctl.download.dataset import download
from ssdctl.download.pinned_files import PinnedFile
print("go", flush=True)
pins = [PinnedFile(*{tuple(pin)!r})]
print(download(pins, Path({str(dest)!r}), connections={connections})[0]["state"])
"""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program], text=True, **pipes)
