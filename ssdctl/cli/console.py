"""Write all output of a command: results to stdout (text or JSON), everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeVar

from ssdctl.errors import DiskError
from ssdctl.files import disk_errors

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

    from ssdctl.errors import SsdctlError

T = TypeVar("T")
STDOUT = Path("standard output")  # in messages
STYLES = {"red": "1;31", "green": "32", "yellow": "1;33", "cyan": "1;36", "bold": "1"}


class MessageHandler(logging.Handler):
    """Passes the messages of the `ssdctl` loggers to the console, or to a display.

    Args:
        sink: Shows information by `say` and warnings by `warn`.
    """

    def __init__(self, sink: MessageSink) -> None:
        super().__init__(logging.INFO)
        self.sink = sink

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        (self.sink.warn if is_warning else self.sink.say)(record.getMessage())


class MessageSink(Protocol):
    """Shows messages to the user."""

    def say(self, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


class Console:
    """The output of a command.

    Args:
        as_json: Write one JSON object to stdout and nothing else.
        quiet: Write only warnings and errors to stderr.
        verbose: Print the traceback of errors.
    """

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.handler = MessageHandler(self)

    @contextlib.contextmanager
    def show_log(self) -> Iterator[None]:
        """Show the messages of the `ssdctl` loggers for the duration of the block.

        A command that runs inside another one replaces the outer one's handler.
        """
        logger = logging.getLogger("ssdctl")
        level, outer = logger.level, list(logger.handlers)
        logger.handlers = [h for h in outer if not isinstance(h, MessageHandler)] + [self.handler]
        logger.setLevel(logging.INFO)
        try:
            yield
        finally:
            logger.handlers = outer
            logger.setLevel(level)

    @property
    def live(self) -> bool:
        """Return whether stderr supports a display that redraws itself."""
        return sys.stderr.isatty() and not self.quiet and os.environ.get("TERM") != "dumb"

    def say(self, text: str) -> None:
        """Write a line of information to stderr, unless quiet."""
        if not self.quiet:
            self._write(text, sys.stderr)

    def warn(self, text: str) -> None:
        """Write a warning to stderr, even if quiet."""
        self._write(text, sys.stderr, label="warning", style="yellow")

    def error(self, error: SsdctlError) -> None:
        """Write the message and the hint of an expected failure to stderr."""
        self._write(str(error), sys.stderr, label="error", style="red")
        if error.hint:
            self._write(error.hint, sys.stderr, label="hint", style="cyan")

    def result(self, data: Any, human: Callable[[], Any] | str | None = None) -> None:
        """Write the result to stdout: `data` as JSON with --json, else `human` (text or table)."""
        if self.as_json:
            self._write(json.dumps(data, ensure_ascii=False, allow_nan=False), sys.stdout)
        elif isinstance(human, str):
            self._write(human, sys.stdout)
        elif human is not None:
            with disk_errors(STDOUT, "writing"):
                _rich(sys.stdout).print(human())

    def progress(
        self, items: Iterable[T], *, total: int | None, label: str, unit: str = "it"
    ) -> Iterator[T]:
        """Yield `items`, with a progress bar on a terminal."""
        if not self.live:
            yield from items
            return
        from tqdm import tqdm

        yield from tqdm(items, total=total, desc=label, unit=unit, leave=False, file=sys.stderr)

    def painted(self, text: str, style: str, stream: IO[str] | None = None) -> str:
        """Return the text in a colour or bold if the stream (None: stdout) supports colours."""
        stream = stream or sys.stdout
        is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        if is_plain or not stream.isatty():
            return text
        return f"\033[{STYLES[style]}m{text}\033[0m"

    def _write(self, text: str, stream: IO[str], label: str = "", style: str = "") -> None:
        if label:
            label = self.painted(f"{label}:", style, stream) + " "
        try:
            with disk_errors(STDOUT, "writing"):
                print(label + text, file=stream, flush=True)
        except DiskError:
            if stream is sys.stdout:
                raise  # a lost result is an error; lost messages on stderr must not end a run


def _rich(stream: IO[str]) -> RichConsole:
    from rich.console import Console as RichConsole

    return RichConsole(file=stream, highlight=False, markup=False, emoji=False)
