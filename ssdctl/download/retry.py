"""When a download is tried again: timeouts, delays and numbers of attempts."""

from __future__ import annotations

from typing import NamedTuple


class RetryableError(Exception):
    """The server cannot answer now. `wait_s` is the delay that it requests, if any."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class RetryPolicy(NamedTuple):
    """Timeouts and retries.

    Attributes:
        connect_s: For a connection.
        read_s: For the next byte on one connection; then it is opened again.
        stall_s: The deadline: less than `min_rate` bytes/s on average over this time is a failure.
        min_rate: Bytes per second, all connections together.
        retries: Failures in a row, without a byte in between, before one connection fails.
        first_retries: The same before the first answer of the server (no network, wrong name).
        backoff_s: Delay after the first failure; doubles with each.
        longest_wait_s: The longest delay, also for Retry-After.
        restarts: How often a file may start from zero (it changed, or there are no ranges).
    """

    connect_s: float = 10.0
    read_s: float = 15.0
    stall_s: float = 30.0
    min_rate: float = 1024.0
    retries: int = 5
    first_retries: int = 2
    backoff_s: float = 0.5
    longest_wait_s: float = 60.0
    restarts: int = 3

    def wait_s(self, failures: int, requested_s: float | None) -> float:
        """Return the delay after so many failures; `requested_s` is the server's request."""
        delay_s = self.backoff_s * 2 ** (failures - 1) if requested_s is None else requested_s
        return min(delay_s, self.longest_wait_s)
