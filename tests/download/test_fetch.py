"""Faults 1 to 14 of a download, each against a real server on the loopback."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import random
import re
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests
from download.http_server import Reply, Request, Route, Server, changed, file

from ssdctl.download.fetch import claim, fetch
from ssdctl.download.http import RetryPolicy
from ssdctl.download.partial_file import Part
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.errors import DiskError, IntegrityError, NetworkError, SsdctlError

CONTENT = random.Random(1).randbytes(2_500_000)
QUICK = RetryPolicy(
    connect_s=2, read_s=0.4, stall_s=1.2, retries=3, connect_retries=1, backoff_s=0.02, restarts=2
)


def pinned(url: str, content: bytes = CONTENT, name: str = "a.bin") -> PinnedFile:
    return PinnedFile(name, url, hashlib.sha256(content).hexdigest(), len(content))


def fetch_quickly(pin: PinnedFile, folder: Path, connections: int = 4) -> Path:
    return fetch(pin, folder, connections=connections, retry_policy=QUICK)


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def tls_certificate(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """A server's TLS context for 127.0.0.1, and its self-signed certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate, and is not here")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -subj /CN=here"
    more = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", *words.split(), *more], check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    return tls, certificate


def leave_part(folder: Path, pin: PinnedFile, arrived: int, validator: str = '"1"') -> None:
    """What a killed download of `pin` leaves: its first `arrived` bytes."""
    part = Part(folder / pin.name, len(CONTENT), 4, pin.url)
    part.adopt(validator)
    append(part, CONTENT[:arrived])
    part.close()


def append(part: Part, content: bytes) -> None:
    """Store the first missing bytes of a part, as one connection."""
    part.piece_bytes = part.num_bytes
    piece = part.take()
    assert piece is not None
    part.write(piece, content)


class TestFetch:
    def test_a_file_is_complete_over_several_connections(
        self, server: Server, tmp_path: Path
    ) -> None:
        slow = changed(file(CONTENT), lambda _, reply: setattr(reply, "pause_s", 0.02))
        pin = pinned(server.route("/a.bin", slow))
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT
        assert names(tmp_path) == ["a.bin"]
        assert 1 < server.num_connections <= 4
        assert server.body_bytes == len(CONTENT)

    def test_connections_are_used_again(self, server: Server, tmp_path: Path) -> None:
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        fetch_quickly(pin, tmp_path, connections=1)
        assert len(server.requests) > 1
        assert server.num_connections == 1

    def test_a_complete_file_is_not_fetched_again(self, server: Server, tmp_path: Path) -> None:
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        fetch_quickly(pin, tmp_path)
        before = len(server.requests)
        fetch_quickly(pin, tmp_path)
        assert len(server.requests) == before

    def test_a_broken_old_file_is_replaced(self, server: Server, tmp_path: Path) -> None:
        (tmp_path / "a.bin").write_bytes(CONTENT[:-1] + b"?")
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT

    def test_an_unknown_size_is_requested(self, server: Server, tmp_path: Path) -> None:
        pin = pinned(server.route("/a.bin", file(CONTENT)))._replace(bytes=None)
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT

    def test_a_prefix_of_the_hash_is_a_pin(self, server: Server, tmp_path: Path) -> None:
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        assert fetch_quickly(pin._replace(sha256=pin.sha256[:8]), tmp_path).is_file()
        wrong = pin._replace(sha256="00000000", name="b.bin")
        with pytest.raises(IntegrityError):
            fetch_quickly(wrong, tmp_path)

    def test_progress_ends_at_the_end(self, server: Server, tmp_path: Path) -> None:
        reports: list[tuple[str, int, int]] = []
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        fetch(pin, tmp_path, retry_policy=QUICK, progress=lambda *what: reports.append(what))
        assert ("a.bin", len(CONTENT), len(CONTENT)) in reports
        assert reports[-1] == ("verifying a.bin", len(CONTENT), len(CONTENT))
        assert reports[0] == ("a.bin", 0, len(CONTENT))  # none of it was there before

    def test_a_mirror_may_hold_files_flat_or_in_the_hosts_layout(
        self, server: Server, tmp_path: Path
    ) -> None:
        pin = pinned("https://example.invalid/bucket/zips/a.bin")
        server.route("/mirror/zips/a.bin", file(CONTENT))
        fetch(pin, tmp_path, mirror=server.url + "/mirror/", retry_policy=QUICK)
        assert (tmp_path / "a.bin").read_bytes() == CONTENT

    def test_an_absent_file_of_a_mirror_names_every_url(
        self, server: Server, tmp_path: Path
    ) -> None:
        pin = pinned("https://example.invalid/zips/a.bin")
        with pytest.raises(NetworkError, match="404") as caught:
            fetch(pin, tmp_path, mirror=server.url + "/mirror", retry_policy=QUICK)
        for path in ("/mirror/a.bin", "/mirror/zips/a.bin"):
            assert f"{server.url}{path}" in str(caught.value)

    def test_a_proxy_that_refuses_is_named_in_words(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
        with pytest.raises(
            NetworkError, match=r"a\.bin: Unable to connect to proxy: Failed to establish .*refused"
        ):
            fetch_quickly(pinned("http://files.invalid/a.bin"), tmp_path)

    def test_a_proxy_of_the_environment_is_used(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        url = "http://files.invalid/a.bin"
        server.routes[url] = file(CONTENT)  # a proxy gets the whole URL
        monkeypatch.setenv("http_proxy", server.url)
        assert fetch_quickly(pinned(url), tmp_path).read_bytes() == CONTENT

    def test_a_ca_bundle_of_the_environment_is_used(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tls, certificate = tls_certificate(tmp_path)
        with Server(tls) as server:
            pin = pinned(server.route("/a.bin", file(CONTENT)))
            patient = QUICK._replace(stall_s=20)
            with pytest.raises(NetworkError, match=r"(?i)certificate"):
                fetch(pin, tmp_path / "data", retry_policy=patient)
            monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
            path = fetch(pin, tmp_path / "data", retry_policy=patient)
            assert path.read_bytes() == CONTENT

    def test_certificates_that_are_not_there(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "absent.pem"))
        with pytest.raises(NetworkError, match=r"absent\.pem") as failure:
            fetch_quickly(pinned("https://127.0.0.1:1/a.bin"), tmp_path)
        assert "REQUESTS_CA_BUNDLE" in str(failure.value.hint)

    def test_a_name_cannot_leave_the_folder(self, tmp_path: Path) -> None:
        pin = pinned("http://127.0.0.1:1/a.bin", name="../a.bin")
        with pytest.raises(IntegrityError):
            fetch_quickly(pin, tmp_path)


def with_(route: Route, **changes: object) -> Route:
    """Return `route` with these attributes of its replies."""
    return changed(route, lambda _, reply: [setattr(reply, *item) for item in changes.items()])


def claims(template: str, more: int = 0) -> Route:
    """Return a route whose Content-Range is wrong, and whose body is longer by `more` bytes."""

    def change(request: Request, reply: Reply) -> None:
        assert request.range is not None
        first, last = request.range
        size = len(CONTENT)
        reply.headers["Content-Range"] = template.format(first, last, first + 1, last + 1, size)
        reply.body = CONTENT[first : last + 1 + more]

    return changed(file(CONTENT), change)


def in_turn(*replies: Reply) -> Route:
    """Return a route that sends these first, and then the file."""
    after = file(CONTENT)
    return lambda request: (
        replies[request.number] if request.number < len(replies) else after(request)
    )


def no_ranges(request: Request) -> Reply:
    return Reply(416) if request.range else Reply(200, {}, CONTENT)


def flapping(request: Request) -> Reply:
    request.headers.pop("if-range", None)
    return file(CONTENT, etag=f'"{request.number}"')(request)


def stalled_once(request: Request) -> Reply:
    reply = file(CONTENT)(request)
    reply.pause_s = 30 if request.number == 1 else 0
    return reply


WHOLE = Reply(200, {}, CONTENT)
BUSY = [
    Reply(503, {"Retry-After": text}) for text in ("86400", "Fri, 31 Dec 9998 23:59:59 GMT", "x")
]
# Number and name of the fault: the server's route, and how many bytes an earlier run received.
SURVIVED: dict[str, tuple[Route, int]] = {
    "2 range ignored": (lambda r: Reply(200, {}, CONTENT, cut=None if r.number else 10**6), 0),
    "2 range ignored after a part arrived": (lambda _: WHOLE, 700_000),
    "4 416 although bytes are missing": (no_ranges, 1000),
    "5 the ETag differs with every reply": (flapping, 0),
    "8 one stall": (stalled_once, 0),
    "9 the wait is capped": (in_turn(*BUSY), 0),
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
            *("bytes {2}-{3}/{4}", "bytes {2}-{1}/{4}", "bytes 0-99/*", "bytes 5-1/{4}"),
            *("garbage", "bytes */{4}", ""),
        )
    },
    # Its end would be written over what another connection brings.
    "3 a longer range": (claims("bytes {0}-{3}/{4}", 1), 0, IntegrityError, "Content-Range"),
    "4 416 of another file": (
        lambda _: Reply(416, {"Content-Range": "bytes */999"}), 0, IntegrityError,
        "999 bytes, the pinned one 2,500,000",
    ),
    **{
        f"7 {kind}": (lambda _, kind=kind: Reply(200, {"Content-Type": kind}, b"<html>"), 0,
                      IntegrityError, re.escape(kind))
        for kind in ("text/html; charset=utf-8", "application/xhtml+xml")
    },
    "9 busy": (lambda _: Reply(503), 0, NetworkError, "503"),
    **{
        f"9 absent {status}": (lambda _, status=status: Reply(status), 0, NetworkError, str(status))
        for status in (401, 404, 410)
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
    "11 a longer part": (
        changed(file(CONTENT), lambda _, reply: setattr(reply, "body", reply.body + b"more")), 0,
        IntegrityError, "more than",
    ),
}  # fmt: skip


class TestFaults:
    def test_1_dropped_every_64_kb(self, server: Server, tmp_path: Path) -> None:
        dropping = changed(file(CONTENT), lambda _, reply: setattr(reply, "cut", 65536))
        pin = pinned(server.route("/a.bin", dropping))
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT
        assert server.body_bytes <= 1.05 * len(CONTENT)

    @pytest.mark.parametrize("fault", SURVIVED)
    def test_survived(self, server: Server, tmp_path: Path, fault: str) -> None:
        route, arrived = SURVIVED[fault]
        server.route("/other.bin", file(CONTENT))
        pin = pinned(server.route("/a.bin", route))
        if arrived:
            leave_part(tmp_path, pin, arrived)
        policy = QUICK._replace(longest_wait_s=0.1)
        path = fetch(pin, tmp_path, connections=4, retry_policy=policy)
        assert path.read_bytes() == CONTENT
        assert names(tmp_path) == ["a.bin"]

    @pytest.mark.parametrize("fault", REFUSED)
    def test_refused(self, server: Server, tmp_path: Path, fault: str) -> None:
        route, arrived, expected, text = REFUSED[fault]
        pin = pinned(server.route("/a.bin", route))
        if arrived:
            leave_part(tmp_path, pin, arrived)
        with pytest.raises(expected, match=text):
            fetch_quickly(pin, tmp_path)
        assert "a.bin" not in names(tmp_path)
        is_permanent = fault.startswith(("7", "9", "10"))
        assert names(tmp_path) == [] or not is_permanent
        most = {"9 busy": QUICK.retries + 1, "10": 11}
        limit = next((n for start, n in most.items() if fault.startswith(start)), 1)
        assert len(server.requests) <= limit or not is_permanent

    def test_7_a_page_for_a_file_of_unknown_size(self, server: Server, tmp_path: Path) -> None:
        page = Reply(200, {"Content-Type": "text/html"}, b"<html>")
        pin = pinned(server.route("/a.bin", lambda _: page))._replace(bytes=None)
        with pytest.raises(IntegrityError, match="text/html"):
            fetch_quickly(pin, tmp_path)

    def test_8_slow_but_steady_is_no_stall(self, server: Server, tmp_path: Path) -> None:
        small = CONTENT[:40_000]
        steady = with_(file(small), pause_s=0.2, slice_bytes=4000)
        pin = pinned(server.route("/a.bin", steady), small)
        assert fetch_quickly(pin, tmp_path).read_bytes() == small

    def test_4_416_on_a_complete_part(self, server: Server, tmp_path: Path) -> None:
        refused = Reply(416, {"Content-Range": f"bytes */{len(CONTENT)}"})
        pin = pinned(server.route("/a.bin", lambda _: refused))
        (tmp_path / "a.bin.part").write_bytes(CONTENT)
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT
        assert names(tmp_path) == ["a.bin"]

    def test_4_416_on_a_complete_part_that_is_wrong(self, server: Server, tmp_path: Path) -> None:
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        (tmp_path / "a.bin.part").write_bytes(bytes(len(CONTENT)))
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT

    @pytest.mark.parametrize("honors_if_range", [True, False])
    def test_5_etag_changed(self, server: Server, tmp_path: Path, honors_if_range: bool) -> None:
        def other(request: Request) -> Reply:
            if not honors_if_range:
                request.headers.pop("if-range", None)
            return file(CONTENT, etag='"2"')(request)

        pin = pinned(server.route("/a.bin", other))
        leave_part(tmp_path, pin, 100)
        part = Part(tmp_path / "a.bin", len(CONTENT), 4, pin.url)
        append(part, bytes(1000))  # another version's bytes
        part.close()
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT
        assert server.body_bytes >= len(CONTENT)
        if honors_if_range:
            assert server.requests[0].headers["if-range"] == '"1"'
        if not honors_if_range:  # detected by the ETag, not by the wrong hash of a mixture
            assert server.body_bytes < 1.3 * len(CONTENT)

    def test_6_one_bit_flipped(self, server: Server, tmp_path: Path) -> None:
        flipped = bytearray(CONTENT)
        flipped[1_234_567] ^= 1
        pin = pinned(server.route("/a.bin", file(bytes(flipped))))
        with pytest.raises(IntegrityError, match="SHA-256"):
            fetch_quickly(pin, tmp_path)
        assert names(tmp_path) == ["a.bin.corrupt"]
        assert (tmp_path / "a.bin.corrupt").read_bytes() == bytes(flipped)

    def test_6_bits_lost_in_an_earlier_run_are_fetched_again(
        self, server: Server, tmp_path: Path
    ) -> None:
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        leave_part(tmp_path, pin, 500_000)
        with (tmp_path / "a.bin.part").open("r+b") as part:
            part.seek(1000)
            part.write(bytes(1000))
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT

    def test_8_a_stall_in_the_body(self, server: Server, tmp_path: Path) -> None:
        def stalled(_: Request, reply: Reply) -> None:
            reply.pause_s = 30
            reply.slice_bytes = 10_000

        self._ends_by_deadline(server, tmp_path, changed(file(CONTENT), stalled))

    def test_8_a_byte_now_and_then(self, server: Server, tmp_path: Path) -> None:
        def dripping(_: Request, reply: Reply) -> None:
            reply.pause_s = 0.05
            reply.slice_bytes = 1

        few = CONTENT[:200]  # without a deadline they arrive in ten seconds
        self._ends_by_deadline(server, tmp_path, changed(file(few), dripping), few)

    def test_8_no_head(self, server: Server, tmp_path: Path) -> None:
        silent = changed(file(CONTENT), lambda _, reply: setattr(reply, "head_pause_s", 30))
        self._ends_by_deadline(server, tmp_path, silent)

    @staticmethod
    def _ends_by_deadline(
        server: Server, tmp_path: Path, route: object, content: bytes = CONTENT
    ) -> None:
        pin = pinned(server.route("/a.bin", route), content)  # type: ignore[arg-type]
        begun = time.monotonic()
        with pytest.raises(NetworkError):
            fetch_quickly(pin, tmp_path)
        assert time.monotonic() - begun < 4

    @pytest.mark.parametrize("status", [429, 503])
    def test_9_busy_is_waited_for(self, server: Server, tmp_path: Path, status: int) -> None:
        def busy(request: Request) -> Reply:
            if request.number == 0:
                return Reply(status, {"Retry-After": "1"})
            return file(CONTENT)(request)

        pin = pinned(server.route("/a.bin", busy))
        begun = time.monotonic()
        # A wait that the server requested is not a stall, however long.
        fetch(pin, tmp_path, retry_policy=QUICK._replace(stall_s=0.6))
        assert time.monotonic() - begun >= 1

    def test_10_https_is_never_left_for_http(
        self, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tls, certificate = tls_certificate(tmp_path)
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        insecure = server.route("/b.bin", file(CONTENT))
        with Server(tls) as secure:
            to_http = pinned(secure.route("/a.bin", lambda _: Reply(302, {"Location": insecure})))
            with pytest.raises(NetworkError, match="HTTPS to HTTP"):
                fetch_quickly(to_http, tmp_path / "data")
            assert not server.requests
            target = secure.route("/b.bin", file(CONTENT))
            for location in ("/b.bin", target):
                route = secure.route("/c.bin", lambda _, to=location: Reply(302, {"Location": to}))
                folder = tmp_path / location.replace("/", "_")
                assert fetch_quickly(pinned(route), folder).read_bytes() == CONTENT
            # From HTTP to HTTPS is fine.
            route = server.route("/d.bin", lambda _: Reply(302, {"Location": target}))
            assert fetch_quickly(pinned(route), tmp_path / "up").read_bytes() == CONTENT

    @pytest.mark.parametrize(
        "reply",
        [
            Reply(404),
            Reply(503),
            Reply(401),
            Reply(200, {"Content-Type": "text/html"}, b"<html>"),
            Reply(200, {}, b"another file"),
            Reply(206, {"Content-Range": "bytes 7-9/2500000"}, b"abc"),
            Reply(302, {"Location": "ftp://bob:hunter2@127.0.0.1/a?X-Amz-Signature=s3cret"}),
            Reply(302, {"Location": "/a.bin?X-Amz-Signature=s3cret"}),
            Reply(200, {}, b"?" * len(CONTENT)),
        ],
    )
    def test_secrets_of_urls_are_not_in_messages(
        self, server: Server, tmp_path: Path, reply: Reply
    ) -> None:
        url = server.route("/a.bin?X-Amz-Signature=s3cret", lambda _: reply)
        with pytest.raises(SsdctlError) as failure:
            fetch_quickly(pinned(url.replace("://", "://bob:hunter2@")), tmp_path)
        text = f"{failure.value} {failure.value.hint}"
        assert "127.0.0.1" in text
        assert "hunter2" not in text
        assert "s3cret" not in text

    @pytest.mark.parametrize("fault", ["refused", "busy"])
    def test_secrets_of_urls_are_not_logged(
        self, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
    ) -> None:
        """The root logger belongs to the program: it also gets the warnings of urllib3."""
        caplog.set_level(logging.DEBUG)
        url = server.route("/a.bin?X-Amz-Signature=s3cret", lambda _: Reply(503))
        if fault == "refused":
            url = "http://127.0.0.1:1/a.bin?X-Amz-Signature=s3cret"
        with pytest.raises(NetworkError):
            fetch_quickly(pinned(url), tmp_path)
        assert any("?***" in message for message in caplog.messages)
        assert not any("s3cret" in message for message in caplog.messages)

    def test_other_requests_are_logged_as_they_are(
        self, server: Server, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.DEBUG)
        requests.get(server.route("/a.bin?x=1", lambda _: Reply(200)), timeout=5)
        assert any("/a.bin?x=1" in message for message in caplog.messages)

    def test_secrets_of_urls_without_a_server(self, tmp_path: Path) -> None:
        for host in ("127.0.0.1:1", "no-such-host.invalid", "[bad"):
            with pytest.raises(SsdctlError) as failure:
                fetch_quickly(pinned(f"http://bob:hunter2@{host}/a?sig=s3cret"), tmp_path)
            assert "hunter2" not in str(failure.value)
            assert "s3cret" not in str(failure.value)

    def test_12_two_downloads_of_one_file(self, server: Server, tmp_path: Path) -> None:
        slow = changed(file(CONTENT), lambda _, reply: setattr(reply, "pause_s", 0.05))
        pin = pinned(server.route("/a.bin", slow))
        threads = [threading.Thread(target=fetch_quickly, args=(pin, tmp_path)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (tmp_path / "a.bin").read_bytes() == CONTENT
        assert names(tmp_path) == ["a.bin"]
        assert server.body_bytes == len(CONTENT)

    def test_12_a_lock_that_was_waited_for_is_the_one_that_others_see(self, tmp_path: Path) -> None:
        """Each holder removes its file: a waiting process must not lock a deleted one."""
        target = tmp_path / "a.bin"
        has_it, may_go = threading.Event(), threading.Event()

        def waits() -> None:
            with claim(target):
                has_it.set()
                may_go.wait(30)

        second = threading.Thread(target=waits)
        with claim(target):
            second.start()
            time.sleep(0.2)
        try:
            assert has_it.wait(30)
            with (tmp_path / "a.bin.lock").open() as seen, pytest.raises(BlockingIOError):
                fcntl.flock(seen, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            may_go.set()
            second.join()
        assert names(tmp_path) == []

    def test_14_a_full_disk_is_seen_before_the_first_byte(
        self, server: Server, tmp_path: Path
    ) -> None:
        (tmp_path / "a.bin").write_bytes(b"old")
        pin = pinned(server.route("/a.bin", file(CONTENT)))._replace(bytes=1 << 60)
        with pytest.raises(DiskError, match="GB"):
            fetch_quickly(pin, tmp_path)
        assert server.requests == []
        assert names(tmp_path) == ["a.bin"]
        assert (tmp_path / "a.bin").read_bytes() == b"old"

    def test_14_a_folder_without_permission_is_a_disk_error(
        self, server: Server, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_bytes(b"")
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        with pytest.raises(DiskError):
            fetch_quickly(pin, tmp_path / "file" / "folder")

    def test_14_a_disk_that_takes_no_more(self, server: Server, tmp_path: Path) -> None:
        """A refusal while writing (here: no file above 1 MB) is a disk error, and can be repaired later."""
        pin = pinned(server.route("/a.bin", file(CONTENT)))
        program = f"""
import resource
from pathlib import Path
from ssdctl.download.fetch import claim, fetch
from ssdctl.download.pinned_files import PinnedFile
from ssdctl.errors import DiskError
resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
try:
    fetch(PinnedFile(*{tuple(pin)!r}), Path({str(tmp_path)!r}))
except DiskError as error:
    print(error)
"""
        output = subprocess.run(
            [sys.executable, "-c", program], check=True, capture_output=True, text=True
        )
        assert "a.bin" in output.stdout
        assert fetch_quickly(pin, tmp_path).read_bytes() == CONTENT

    def test_no_server(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        with Server() as stopped:
            url = stopped.url + "/a.bin?sig=SECRET"
        with pytest.raises(NetworkError, match="refused"):
            fetch_quickly(pinned(url), tmp_path)
        assert "SECRET" not in caplog.text  # urllib3 logs what it sends again


class TestKills:
    """Fault 13: kill -9 at any byte."""

    def test_a_few(self, server: Server, tmp_path: Path) -> None:
        self._kill(server, tmp_path, num_kills=3, seed=1)

    @pytest.mark.slow
    def test_many(self, server: Server, tmp_path: Path) -> None:
        self._kill(server, tmp_path, num_kills=50, seed=2)

    @staticmethod
    def _kill(server: Server, folder: Path, num_kills: int, seed: int) -> None:
        content = random.Random(seed).randbytes(800_000 * num_kills)
        dice = random.Random(seed)
        slow = changed(file(content), lambda _, reply: setattr(reply, "pause_s", 0.03))
        pin = pinned(server.route("/a.bin", slow), content)
        program = f"""
from pathlib import Path
from ssdctl.download.fetch import claim, fetch
from ssdctl.download.pinned_files import PinnedFile
fetch(PinnedFile(*{tuple(pin)!r}), Path({str(folder)!r}), connections=2)
"""
        killed = 0
        for _ in range(num_kills):
            sent = server.body_bytes
            process = subprocess.Popen([sys.executable, "-c", program])
            until = sent + dice.randrange(700_000)
            while server.body_bytes <= until and process.poll() is None:
                time.sleep(dice.random() / 100)
            os.kill(process.pid, signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        assert killed == num_kills
        subprocess.run([sys.executable, "-c", program], check=True)
        assert (folder / "a.bin").read_bytes() == content
        assert names(folder) == ["a.bin"]
        # What was on the wire when a process died is lost: two connections' buffers a kill.
        in_flight = num_kills * 2 * 128 * 1024
        assert server.body_bytes <= len(content) + in_flight
