"""A loopback HTTP server that follows a script: each route is a function from request to reply."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Request:
    """A client's request; `number` counts the requests of this route from 0."""

    path: str
    headers: dict[str, str]
    number: int

    @property
    def range(self) -> tuple[int, int] | None:
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", ""))
        return (int(match[1]), int(match[2])) if match else None


@dataclass
class Reply:
    """The server's reply: the head, then the body, `cut` short or sent slowly."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    length: bool = True  # send Content-Length; else chunked
    cut: int | None = None  # break the connection after so many bytes of the body
    head_pause_s: float = 0.0
    pause_s: float = 0.0  # before each `slice_bytes` of the body
    slice_bytes: int = 64 * 1024


Route = Callable[[Request], Reply]


def file(content: bytes, etag: str = '"1"', **how: Any) -> Route:
    """A well-behaved file: ranges, ETag, If-Range, 416; `how` are fields of the replies."""

    def reply(request: Request) -> Reply:
        headers = {"ETag": etag, "Content-Type": "application/octet-stream"}
        if request.headers.get("if-range", etag) != etag or request.range is None:
            return Reply(200, headers, content, **how)
        first, last = request.range
        if first >= len(content):
            return Reply(416, headers | {"Content-Range": f"bytes */{len(content)}"})
        part = content[first : last + 1]
        headers["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(content)}"
        return Reply(206, headers, part, **how)

    return reply


class Server:
    """Serves in threads until the block ends, which closes all connections and threads."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.scheme = "https" if tls else "http"
        self.routes: dict[str, Route] = {}
        self.requests: list[Request] = []
        self.body_bytes = 0
        self.num_connections = 0
        self.lock = threading.Lock()
        self.ending = threading.Event()
        self.open: set[socket.socket] = set()
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                # What a client that dies has not read is lost: little, however slow it is.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)
                with script.lock:
                    script.num_connections += 1
                    script.open.add(self.connection)

            def finish(self) -> None:
                with script.lock:
                    script.open.discard(self.connection)
                with contextlib.suppress(OSError):
                    super().finish()

            def do_GET(self) -> None:
                script.answer(self)

            do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815 - http.server names them

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle()

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False  # server_close joins them
        if tls is not None:
            self.http.socket = tls.wrap_socket(self.http.socket, server_side=True)
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))

    def __enter__(self) -> Server:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ending.set()
        self.http.shutdown()
        self.thread.join()
        with self.lock:
            for connection in self.open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        self.http.server_close()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.http.server_address[1]}"

    def route(self, path: str, route: Route) -> str:
        self.routes[path] = route
        return self.url + path

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        with self.lock:
            number = sum(r.path == handler.path for r in self.requests)
            headers = {key.lower(): value for key, value in handler.headers.items()}
            request = Request(handler.path, headers, number)
            self.requests.append(request)
        route = self.routes.get(handler.path, lambda _: Reply(404, {}, b"no such file"))
        reply = route(request)
        if reply.head_pause_s:
            self.ending.wait(reply.head_pause_s)
        handler.send_response(reply.status)
        for key, value in reply.headers.items():
            handler.send_header(key, value)
        if not reply.length:
            handler.send_header("Transfer-Encoding", "chunked")
        elif "Content-Length" not in reply.headers:
            handler.send_header("Content-Length", str(len(reply.body)))
        handler.end_headers()
        for start in range(0, len(reply.body), reply.slice_bytes):
            piece = reply.body[start : start + reply.slice_bytes]
            if reply.pause_s and self.ending.wait(reply.pause_s):
                break
            is_cut = reply.cut is not None and start + len(piece) >= reply.cut
            if reply.cut is not None:
                piece = piece[: reply.cut - start]
            handler.wfile.write(piece if reply.length else b"%x\r\n%b\r\n" % (len(piece), piece))
            with self.lock:
                self.body_bytes += len(piece)
            if is_cut:
                handler.wfile.flush()
                handler.close_connection = True
                handler.connection.shutdown(socket.SHUT_RDWR)
                return
        if not reply.length:
            handler.wfile.write(b"0\r\n\r\n")
