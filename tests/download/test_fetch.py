"""Faults 1 to 14 of a download, each against a real server on the loopback."""

import hashlib
import json
import logging
import random
import re
import shutil
import ssl
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from download.http_server import Reply, Request, Route, Server, file
from download.zips import start_download, tree

from ssdctl.download.fetch import fetch
from ssdctl.download.http import RetryPolicy
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.download.transfer import PartialFile, partial_path
from ssdctl.errors import DiskError, IntegrityError, NetworkError, SsdctlError

CONTENT = random.Random(1).randbytes(2_500_000)
FILE = file(CONTENT)
# Few and quick retries, but no time limit that a busy machine passes.
POLICY = RetryPolicy(retries=3, connect_retries=1, backoff_s=0.02, restarts=2)
IMPATIENT = POLICY._replace(connect_s=2, read_s=0.4, stall_s=1.2)
SECRET_QUERY = "X-Amz-Signature=s3cret"


def pinned(url: str, content: bytes = CONTENT, name: str = "a.bin") -> PinnedFile:
    return PinnedFile(name, url, hashlib.sha256(content).hexdigest(), len(content))


def append(partial: PartialFile, content: bytes) -> None:
    """Store the first missing bytes of a file, as one connection."""
    partial.piece_bytes = partial.num_bytes
    piece = partial.take()
    partial.write(piece, content)


class Site:
    """A server with the file /a.bin, and the folder that it is fetched to."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.requests = server.requests

    def pin(self, route: Route = FILE, content: bytes = CONTENT, arrived: int = 0) -> PinnedFile:
        """Serve a route; a killed download left the first `arrived` bytes of it."""
        pin = pinned(self.server.route("/a.bin", route), content)
        if arrived:
            partial = PartialFile(self.folder / pin.name, len(content), 4)
            append(partial, content[:arrived])
            partial.close()
        return pin

    def fetch(self, pin: PinnedFile, folder: str = "", **how: Any) -> bytes:
        how = {"connections": 4, "retry_policy": POLICY, **how}
        path = fetch(pin, self.folder / folder, **how)
        assert path == self.folder / folder / pin.name
        return path.read_bytes()

    def files(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir())


@pytest.fixture
def site(server: Server, tmp_path: Path) -> Site:
    return Site(server, tmp_path)


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, str]:
    """A server's TLS context for 127.0.0.1, and its self-signed certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not here")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=here"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *words.split(), *more], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context, str(certificate)


def test_a_file_is_complete_over_several_connections(site: Site) -> None:
    reports: list[tuple[str, int, int]] = []
    pin = site.pin(file(CONTENT, pause_s=0.02))
    assert site.fetch(pin, progress=lambda *what: reports.append(what)) == CONTENT
    assert site.files() == ["a.bin"]
    assert 1 < site.server.num_connections <= 4
    assert site.server.body_bytes == len(CONTENT)
    assert reports[0] == ("a.bin", 0, len(CONTENT))  # none of it was there before
    assert ("a.bin", len(CONTENT), len(CONTENT)) in reports
    assert reports[-1] == ("verifying a.bin", len(CONTENT), len(CONTENT))


def test_one_connection_is_used_again_and_only_a_broken_file_replaced(site: Site) -> None:
    pin = site.pin()
    site.fetch(pin, connections=1)
    before = len(site.requests)
    assert before > 1
    assert site.server.num_connections == 1
    site.fetch(pin)
    assert len(site.requests) == before
    (site.folder / "a.bin").write_bytes(CONTENT[:-1] + b"?")
    assert site.fetch(pin) == CONTENT
    assert site.files() == ["a.bin", "a.bin.replaced"]


def test_the_size_may_be_unknown_and_the_hash_a_prefix(site: Site) -> None:
    pin = site.pin()
    assert site.fetch(pin._replace(bytes=None, sha256=pin.sha256[:8])) == CONTENT
    with pytest.raises(IntegrityError):
        site.fetch(pin._replace(sha256="00000000", name="b.bin"))
    with pytest.raises(IntegrityError):
        site.fetch(pin._replace(name="../a.bin"))


def test_a_mirror_may_hold_files_flat_or_in_the_hosts_layout(site: Site) -> None:
    pin = pinned("https://example.invalid/bucket/zips/a.bin", name="a#.bin")
    mirror = site.server.url + "/mirror"
    with pytest.raises(NetworkError, match="404") as caught:
        site.fetch(pin, mirror=mirror)
    for path in ("/a%23.bin", "/zips/a.bin"):
        assert mirror + path in str(caught.value)
    page = {"Content-Type": "text/html"}
    site.server.route("/mirror/a%23.bin?sig=1", lambda _: Reply(200, page, b"<html>"))
    site.server.route("/mirror/zips/a.bin?sig=1", lambda _: Reply(200, page, CONTENT))  # by hash
    assert site.fetch(pin, mirror=mirror + "/?sig=1") == CONTENT


def test_the_proxy_of_the_environment(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = pinned("http://files.invalid/a.bin")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with pytest.raises(NetworkError, match=r"a\.bin: Unable to connect to proxy: .*refused"):
        site.fetch(pin)
    site.server.routes[pin.url] = FILE  # a proxy gets the whole URL
    monkeypatch.setenv("http_proxy", site.server.url)
    assert site.fetch(pin) == CONTENT


def test_the_certificates_of_the_environment(
    site: Site, tls: tuple[ssl.SSLContext, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Server(tls[0]) as secure:
        pin = pinned(secure.route("/a.bin", FILE))
        with pytest.raises(NetworkError, match=r"(?i)certificate"):
            site.fetch(pin)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls[1])
        assert site.fetch(pin) == CONTENT
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "absent.pem")
    with pytest.raises(NetworkError, match=r"absent\.pem") as failure:
        site.fetch(pinned("https://127.0.0.1:1/a.bin", name="b.bin"))
    assert "REQUESTS_CA_BUNDLE" in str(failure.value.hint)


def claims(template: str, more: int = 0) -> Route:
    """Return a route whose Content-Range is wrong, and whose body is longer by `more` bytes."""

    def reply(request: Request) -> Reply:
        first, last = request.range
        text = template.format(first, last, first + 1, last + 1, len(CONTENT))
        return Reply(206, {"ETag": '"1"', "Content-Range": text}, CONTENT[first : last + 1 + more])

    return reply


def in_turn(*replies: Reply) -> Route:
    return lambda request: (
        replies[request.number] if request.number < len(replies) else FILE(request)
    )


def no_ranges(request: Request) -> Reply:
    return Reply(416) if request.range else Reply(200, {}, CONTENT)


def stalled_once(request: Request) -> Reply:
    return file(CONTENT, pause_s=30 if request.number == 1 else 0)(request)


def limited(request: Request) -> Reply:
    """Refuse all connections but the first one."""
    is_refused = 0 < request.number <= 3 * (POLICY.retries + 1)
    return Reply(429) if is_refused else file(CONTENT, pause_s=0.3 * (not request.number))(request)


def cut_once(request: Request) -> Reply:
    return Reply(200, {}, CONTENT, cut=None if request.number else 10**6)


BUSY = [
    Reply(503, {"Retry-After": text}) for text in ("86400", "Fri, 31 Dec 9998 23:59:59 GMT", "x")
]
# Number and name of the fault: the server's route, and how many bytes an earlier run received.
SURVIVED: dict[str, tuple[Route, int]] = {
    "1 dropped every 64 kB": (file(CONTENT, cut=65536), 0),
    "2 range ignored": (cut_once, 0),
    "4 416 although bytes are missing": (no_ranges, 1000),
    "8 one stall": (stalled_once, 0),
    "8 slow but steady": (file(CONTENT, slice_bytes=16_000, pause_s=0.05), 0),
    "9 the wait is capped": (in_turn(*BUSY), 0),
    "9 few connections are allowed": (limited, 0),
    "10 a redirect": (lambda _: Reply(302, {"Location": "/other.bin"}), 0),
}
# The same, and the error.
REFUSED: dict[str, tuple[Route, int, type[SsdctlError], str | None]] = {
    "2 always broken": (
        lambda _: Reply(200, {}, CONTENT, cut=500_000), 0, NetworkError, "ignores ranges"
    ),
    **{
        f"3 Content-Range {text!r}": (claims(text), 1000, IntegrityError, "Content-Range")
        for text in (
            *("bytes {2}-{3}/{4}", "bytes {2}-{1}/{4}", "bytes 0-99/*", "garbage", ""),
        )
    },
    # Its end would be written over what another connection brings.
    "3 a longer range": (claims("bytes {0}-{3}/{4}", 1), 0, IntegrityError, "Content-Range"),
    "4 416 of another file": (
        lambda _: Reply(416, {"Content-Range": "bytes */999"}), 0, IntegrityError,
        "999 bytes, the pinned one 2,500,000",
    ),
    "7 a page": (
        lambda _: Reply(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>"), 0,
        NetworkError, "text/html; charset=utf-8"
    ),
    "9 busy": (lambda _: Reply(503), 0, NetworkError, "503"),
    **{
        f"9 absent {status}": (lambda _, status=status: Reply(status), 0, NetworkError, str(status))
        for status in (400, 401, 404, 407, 410)
    },
    **{
        f"10 {to}": (lambda _, to=to: Reply(302, {"Location": to}), 0, NetworkError, None)
        for to in (
            *("/a.bin", "file:///etc/hostname", "ftp://127.0.0.1/a", "//", "http://[::1"),
            "/\xe2",  # sent in Latin-1: not UTF-8
        )
    },
    "11 a longer file": (file(CONTENT + b"more"), 0, IntegrityError, "2,500,004.*2,500,000"),
    "11 another Content-Length": (
        lambda _: Reply(200, {}, CONTENT[:-1]), 0, IntegrityError, "2,499,999.*2,500,000"
    ),
    "11 a longer body": (
        lambda _: Reply(200, {}, CONTENT + b"more", length=False), 0, IntegrityError, "more than"
    ),
    "11 a longer part": (claims("bytes {0}-{1}/{4}", 4), 0, IntegrityError, "more than"),
}  # fmt: skip


@pytest.mark.parametrize("fault", SURVIVED)
def test_survived(site: Site, fault: str) -> None:
    route, arrived = SURVIVED[fault]
    site.server.route("/other.bin", FILE)
    policy = POLICY._replace(longest_wait_s=0.1)
    if fault.startswith("8"):
        policy = policy._replace(read_s=1, stall_s=1.5 if "steady" in fault else 6)
    pin = site.pin(route, arrived=arrived)
    assert site.fetch(pin, retry_policy=policy) == CONTENT
    assert site.files() == ["a.bin"]


@pytest.mark.parametrize("fault", REFUSED)
def test_refused(site: Site, fault: str) -> None:
    route, arrived, expected, text = REFUSED[fault]
    pin = site.pin(route, arrived=arrived)
    with pytest.raises(expected, match=text) as refused:
        site.fetch(pin)
    assert "--mirror" not in str(refused.value.hint)  # only some commands have it
    assert ("later" in str(refused.value.hint)) == (fault == "9 busy")
    assert "a.bin" not in site.files()
    is_permanent = fault.startswith(("7", "9", "10"))
    assert site.files() == [] or not is_permanent
    most = {"9 busy": POLICY.retries + 1, "10": 11}
    limit = next((n for start, n in most.items() if fault.startswith(start)), 1)
    assert len(site.requests) <= limit or not is_permanent


def test_4_a_complete_part_that_is_right_or_wrong(site: Site) -> None:
    refused = Reply(416, {"Content-Range": f"bytes */{len(CONTENT)}"})
    for route, content in ((lambda _: refused, CONTENT), (FILE, bytes(len(CONTENT)))):
        (site.folder / "a.bin").unlink(missing_ok=True)
        partial_path(site.folder / "a.bin").write_bytes(content)
        assert site.fetch(site.pin(route)) == CONTENT
        assert site.files() == ["a.bin"]


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        *((wrong, 0) for wrong in ([[5, 3]], [[0, 2**40]], [[7, 9], [8, 10]], [[-7, 9]])),
        # No record, or none that can be read: the hash decides whether the file is complete.
        *((unknown, len(CONTENT)) for unknown in ("many", None)),
    ],
)
def test_an_invalid_record_of_a_part(site: Site, missing: object, expected: int) -> None:
    target = site.folder / site.pin(arrived=1000).name
    content = partial_path(target).read_bytes()[: len(CONTENT)]
    changed = b"" if missing is None else json.dumps(missing).encode()
    partial_path(target).write_bytes(content + changed)
    partial = PartialFile(target, len(CONTENT), 4)
    assert partial.arrived_bytes == expected
    partial.close()


def test_6_flipped_bits(site: Site) -> None:
    flipped = bytearray(CONTENT)
    flipped[1_234_567] ^= 1
    mine = {"a.bin.corrupt": b"mine", "a.bin.lock": b"my version", "a.bin.part": b"my part"}
    for name, content in mine.items():
        (site.folder / name).write_bytes(content)
    for _ in range(2):
        with pytest.raises(IntegrityError, match="SHA-256"):
            site.fetch(site.pin(file(bytes(flipped))))
    assert tree(site.folder) == {**mine, "a.bin.corrupt1": bytes(flipped)}
    pin = site.pin(arrived=500_000)  # those of an earlier run are fetched again
    with partial_path(site.folder / "a.bin").open("r+b") as partial:
        partial.seek(1000)
        partial.write(bytes(1000))
    assert site.fetch(pin) == CONTENT


def test_8_a_stall_ends_by_the_deadline(site: Site) -> None:
    few = CONTENT[:200]
    stalls: tuple[dict[str, Any], ...] = (
        {"pause_s": 30, "slice_bytes": 10_000},  # nothing in the body
        {"pause_s": 0.05, "slice_bytes": 1},  # a byte now and then: ten seconds in all
        {"head_pause_s": 30},
    )
    for how in stalls:
        begun = time.monotonic()
        with pytest.raises(NetworkError):
            site.fetch(site.pin(file(few, **how), few), retry_policy=IMPATIENT)
        assert time.monotonic() - begun < 8


def test_10_https_is_never_left_for_http(
    site: Site, tls: tuple[ssl.SSLContext, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def to(url: str) -> Route:
        return lambda _: Reply(302, {"Location": url})

    monkeypatch.setenv("REQUESTS_CA_BUNDLE", tls[1])
    with Server(tls[0]) as secure:
        pin = pinned(secure.route("/a.bin", to(site.server.route("/b.bin", FILE))))
        with pytest.raises(NetworkError, match="HTTPS to HTTP"):
            site.fetch(pin)
        assert not site.requests
        target = secure.route("/b.bin", FILE)
        for url in ("/b.bin", target):
            assert site.fetch(pinned(secure.route("/c.bin", to(url)))) == CONTENT
            (site.folder / "a.bin").unlink()
        assert site.fetch(site.pin(to(target))) == CONTENT  # from HTTP to HTTPS is fine


SECRET_REPLIES = (
    Reply(404),
    Reply(200, {"Content-Type": "text/html"}, b"<html>"),
    Reply(200, {}, b"another file"),
    Reply(302, {"Location": f"ftp://bob:hunter2@127.0.0.1/a?{SECRET_QUERY}"}),
    Reply(302, {"Location": f"/a.bin?{SECRET_QUERY}"}),
    Reply(200, {}, b"?" * len(CONTENT)),
    Reply(503),
)


def test_secrets_of_urls_are_never_shown(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "ssdctl")
    urls = [f"http://bob:hunter2@{h}/a?sig=s3cret" for h in ("127.0.0.1:1", "no.invalid", "[bad")]
    for number, reply in enumerate(SECRET_REPLIES):
        url = site.server.route(f"/{number}/a.bin?{SECRET_QUERY}", lambda _, reply=reply: reply)
        urls.append(url.replace("://", "://bob:hunter2@"))
    for url in urls:
        with pytest.raises(SsdctlError) as failure:
            site.fetch(pinned(url))
        text = f"{failure.value} {failure.value.hint}"
        assert url.partition("@")[2][:5] in text
        assert not re.search("hunter2|s3cret", text)
    assert not re.search("hunter2|s3cret", caplog.text)


def test_14_a_disk_that_is_full(site: Site) -> None:
    (site.folder / "a.bin").write_bytes(b"old")
    with pytest.raises(DiskError, match="GB"):
        site.fetch(site.pin()._replace(bytes=1 << 60))
    assert site.requests == []
    assert site.files() == ["a.bin"]
    assert (site.folder / "a.bin").read_bytes() == b"old"
    # A refusal while writing (here: no file above 1 MB) can be repaired later.
    pin = site.pin()
    with pytest.raises(DiskError):
        site.fetch(pin, "a.bin/folder")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))"
    error = start_download(pin, site.folder, before=limit).communicate()[1]
    assert "DiskError" in error
    assert "a.bin" in error.splitlines()[-1]
    assert site.fetch(pin) == CONTENT
