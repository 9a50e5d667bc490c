"""Write all output of a command: results to stdout (text or JSON), everything else to stderr."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from ssdctl.errors import DiskError, Interrupted, Stopped
from ssdctl.files import disk_errors
from ssdctl.runtime.progress import above_bars, progress_bar
from ssdctl.runtime.safe_text import printable, printable_line, printable_message, redact_urls
from ssdctl.runtime.system import stdout_to_stderr

if TYPE_CHECKING:
    from rich.console import Console as RichConsole
    from rich.table import Table
    from rich.text import Text

    from ssdctl.errors import SsdctlError

T = TypeVar("T")
STDOUT = Path("standard output")  # in messages
UNLIMITED = 100_000  # columns
MAX_MESSAGE = 20_000  # characters
STYLES = {"red": "1;31", "green": "32", "yellow": "1;33", "cyan": "1;36", "bold": "1", "dim": "2"}


class Console(logging.Handler):
    """The output of a command, and the handler of the messages that it logs.

    Args:
        as_json: Write one JSON object to stdout and nothing else.
        quiet: Write only warnings and errors to stderr.
        verbose: Print details, and tracebacks of errors.
    """

    def __init__(
        self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False
    ) -> None:
        super().__init__(logging.INFO)
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self.is_nested = False  # inside another command, such as demo
        self._stdout: IO[str] | None = None  # while what others print goes to stderr

    def emit(self, record: logging.LogRecord) -> None:
        is_warning = record.levelno >= logging.WARNING
        (self.warning if is_warning else self.info)(record.getMessage())

    @contextlib.contextmanager
    def show_log(self) -> Iterator[None]:
        """Show the messages of the `ssdctl` loggers for the duration of the block.

        A command that runs inside another one replaces the outer one's console.
        """
        logger = logging.getLogger("ssdctl")
        level, outer, propagate = logger.level, list(logger.handlers), logger.propagate
        others = [handler for handler in outer if not isinstance(handler, Console)]
        self.is_nested = len(others) < len(outer)
        logger.handlers = [*others, self]
        logger.setLevel(logging.INFO)
        logger.propagate = False  # torch_xla gives the root logger a handler
        try:
            with contextlib.ExitStack() as aside:
                if self.as_json:
                    self._stdout = aside.enter_context(_only_results())
                yield
        finally:
            self._stdout = None
            logger.handlers = outer
            logger.setLevel(level)
            logger.propagate = propagate

    @property
    def stdout(self) -> IO[str]:
        return self._stdout or sys.stdout

    @property
    def live(self) -> bool:
        return sys.stderr.isatty() and not self.quiet and os.environ.get("TERM") != "dumb"

    def info(self, text: str, style: str = "") -> None:
        if not self.quiet:
            self._message(text, style=style)

    def warning(self, text: str) -> None:
        self._message(text, label="warning", style="yellow")

    def closing(
        self, facts: Sequence[tuple[str, str | Path]], next_commands: Sequence[str] = ()
    ) -> None:
        """Write the last block of a command to stderr: the written files, and commands to run next.

        Nothing is written with -q or --json, and on ranks that are quiet; no commands inside
        another command, which has its own.
        """
        if self.quiet or self.as_json:
            return
        commands = [] if self.is_nested else next_commands
        self.facts(facts, commands)

    def facts(
        self, rows: Sequence[tuple[str, str | Path]], next_commands: Sequence[str] = ()
    ) -> None:
        """Write lines of a name and a text to stderr, aligned, unless quiet.

        A path becomes a link where the terminal has links. A command stays in one line: a
        terminal's own wrapping can be copied.
        """
        if self.quiet:
            return
        commands = [("" if n else "next", line) for n, line in enumerate(next_commands)]
        rows = [*rows, *commands]
        width = max((len(name) for name, _ in rows), default=0)
        has_links = sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "linux")
        for name, text in rows:
            start = f"{name:<{width}}  "
            line = start + printable_line(redact_urls(str(text)))
            is_command = (name, text) in commands
            line = line if is_command else wrapped(line, sys.stderr, len(start))
            shown = line.removeprefix(start)
            if has_links and isinstance(text, Path):
                shown = f"\033]8;;{text.absolute().as_uri()}\033\\{shown}\033]8;;\033\\"
            label = painted(name, "green" if name == "best" else "bold", sys.stderr)
            self._write(label + start[len(name) :] + shown, sys.stderr)

    def error(self, error: SsdctlError) -> None:
        """Write the message and the hint of an expected failure, or of a stop, to stderr."""
        is_stop = isinstance(error, (Interrupted, Stopped))
        label, style = ("", "") if is_stop else ("error", "red")
        message, hint = error.for_command_line()
        self._message(message, label=label, style=style)
        if hint:
            self._message(hint, label="hint", style="cyan")

    def result(
        self, data: Any, human: Callable[[], Any] | str | None = None, *, is_painted: bool = False
    ) -> None:
        """Write the result to stdout.

        Args:
            data: Printed as JSON with --json.
            human: Printed without --json: text, or a function that returns a rich table.
            is_painted: `human` is text with colors, and its other parts are printable.
        """
        if self.as_json:
            self._write(_json(data, self.stdout), self.stdout)
        elif isinstance(human, str):
            self._write(human if is_painted else printable(human), sys.stdout)
        elif human is not None:
            console = rich_console(sys.stdout)
            with console.capture() as capture:
                console.print(human())
            lines = (line.rstrip(" ") for line in capture.get().split("\n"))
            self._write("\n".join(lines), sys.stdout, end="")

    def copy(self, text: str) -> None:
        """Copy another program's output to stdout (with --json: to stderr), printable."""
        stream = sys.stderr if self.as_json else sys.stdout
        self._write(printable(text.replace("\r\n", "\n")), stream, end="")

    def progress(
        self, items: Iterable[T], *, total: int | None, label: str, unit: str = "it"
    ) -> Iterator[T]:
        """Yield `items`, with a progress bar on a terminal."""
        if self.live:
            items = progress_bar(items, total=total, label=printable_line(label), unit=unit)
        yield from items

    def _message(self, text: str, label: str = "", style: str = "") -> None:
        """Print a message, which may contain untrusted text and URLs with secrets."""
        if len(text) > MAX_MESSAGE:  # a hostile file can have a name of any length
            text = f"{text[:MAX_MESSAGE]}... ({len(text) - MAX_MESSAGE:,} more characters)"
        text = redact_urls(text)
        # A leading newline is our own.
        text = printable(text) if text.startswith("\n") else printable_message(text)
        lines = (f"{label}: {text}" if label else text).split("\n")
        text = "\n".join(wrapped(line, sys.stderr, 2) for line in lines)
        start = f"{label}:" if label else text  # else all of it
        if style:
            text = painted(start, style, sys.stderr) + text.removeprefix(start)
        self._write(text, sys.stderr)

    def _write(self, text: str, stream: IO[str], end: str = "\n") -> None:
        try:
            with disk_errors(STDOUT, "writing"), above_bars(stream):
                print(_encodable(text, stream), file=stream, end=end, flush=True)
        except (DiskError, BrokenPipeError):
            if stream is self.stdout:
                raise  # a lost result is an error; lost messages on stderr must not end a run


def painted(text: str, style: str, stream: IO[str] | None = None) -> str:
    """Return the text in a color or bold if the stream (None: stdout) supports colors."""
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if is_plain or not (stream or sys.stdout).isatty():
        return text
    return f"\033[{STYLES[style]}m{text}\033[0m"


@contextlib.contextmanager
def _only_results() -> Iterator[IO[str]]:
    """Yield stdout; what plugins, their processes and C libraries print goes to stderr."""
    with contextlib.ExitStack() as aside:
        stdout = sys.stdout
        with contextlib.suppress(OSError, ValueError):  # a stream of a program without a file
            if (stdout.fileno(), sys.stderr.fileno()) == (1, 2):
                kept = aside.enter_context(stdout_to_stderr())
                encoding, errors = stdout.encoding, stdout.errors
                # The descriptor is closed by its owner, after the results.
                stdout = open(kept, "w", encoding=encoding, errors=errors, closefd=False)  # noqa: SIM115
        aside.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield stdout


def aligned(rows: Sequence[tuple[str, str]]) -> str:
    """Return lines of a name and a text; on a terminal the texts wrap between words."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(
        wrapped(f"{name:<{width}}  {text}", sys.stdout, width + 2) for name, text in rows
    )


def wrapped(text: str, stream: IO[str], indent: int = 0) -> str:
    """Wrap a line between words if it is longer than the terminal's."""
    columns = shutil.get_terminal_size().columns
    if not stream.isatty() or len(text) <= columns or columns < 2 * indent:
        return text
    return textwrap.fill(
        text,
        columns,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def table(*columns: str, rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> Table:
    """Return a table without lines; the columns other than `left` hold numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in left else "right")
    for row in rows:
        table.add_row(*row)
    return table


def _json(data: Any, stream: IO[str]) -> str:
    text = json.dumps(data, ensure_ascii=False, allow_nan=False)
    return text if is_encodable(text, stream) else json.dumps(data, allow_nan=False)


def is_encodable(text: str, stream: IO[str]) -> bool:
    return _encodable(text, stream) == text


def _encodable(text: str, stream: IO[str]) -> str:
    """Escape characters that the stream cannot encode, such as surrogates."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # a Tee, a StringIO
    return text.encode(encoding, "backslashreplace").decode(encoding)


def rich_console(stream: IO[str]) -> RichConsole:
    """Return a rich console that prints all text printable and without markup."""
    from rich.console import Console as RichConsole

    class PrintableConsole(RichConsole):
        def render_str(self, text: str, **options: Any) -> Text:
            options["markup"] = False
            return super().render_str(_encodable(printable(text), stream), **options)

    is_narrow = stream.isatty() or "COLUMNS" in os.environ
    width = None if is_narrow else UNLIMITED  # a reader of a pipe wants a row in a line
    return PrintableConsole(file=stream, highlight=False, markup=False, emoji=False, width=width)
