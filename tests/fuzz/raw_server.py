"""A loopback server that answers every connection with the same bytes."""

from __future__ import annotations

import contextlib
import socket
import threading


class RawServer:
    """Sends `reply` to each client and closes the connection, until the block ends."""

    def __init__(self) -> None:
        self.reply = b""
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RawServer:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
        self.thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}/a.bin"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            with contextlib.suppress(OSError), connection:
                connection.settimeout(1)
                connection.recv(65536)
                connection.sendall(self.reply)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # an RST would lose the reply
                    pass
