"""Expected failures and exit codes.

An error is one message: what is wrong, where, and (in `hint`) what to do next. The command line
prints it without a traceback and exits with the error's code. Any other exception is a bug: exit 1.
"""

from __future__ import annotations

import enum
import importlib
from collections.abc import Callable
from typing import Any


class ExitCode(enum.IntEnum):
    """The exit codes of every command and their meaning. Scripts and batch systems rely on them."""

    meaning: str

    OK = 0, "success"
    BUG = 1, "a bug in ssdctl"
    USAGE = 2, "wrong option or config, or a device or tool is missing"
    DATA = 3, "bad annotations, images or dataset folder"
    NETWORK = 4, "network"
    INTEGRITY = 5, "a checksum, an archive or a checkpoint is wrong, or has other classes"
    DISK = 6, "a file cannot be read or written"
    NON_FINITE = 7, "NaN or infinite loss, gradient or output"
    DISTRIBUTED = 8, "a rank failed or was lost"
    WORSE = 10, "`evaluate --fail-if-worse`: the detector is worse than the one of `--against`"
    STOPPED = 75, "stopped by a signal, work so far is kept; run the same command again to continue"
    INTERRUPTED = 130, "stopped by Ctrl-C (by the second one where the first saves progress)"

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        member = int.__new__(cls, code)
        member._value_ = code
        member.meaning = meaning
        return member

    def __str__(self) -> str:
        return str(self.value)


class SsdctlError(Exception):
    """An expected failure; only its subclasses are raised.

    Args:
        message: What is wrong, and where.
        hint: What to do next.
    """

    exit_code = ExitCode.BUG

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.is_from_all_ranks = False  # the same error was raised on every rank
        self.host: str | None = None  # of the rank that failed; None: this one
        self._written: tuple[str, str | None] | None = None

    @property
    def message(self) -> str:
        """What is wrong, without the hint that `hints_in_messages` adds."""
        return str(self).removesuffix(f"\nhint: {self.hint}")

    def for_command_line(self) -> tuple[str, str | None]:
        """Return message and hint with options, also if the error left the Python API."""
        return self._written or (self.message, self.hint)

    def begin_with(self, words: str) -> None:
        """Put words before the message, unless they are in it."""
        message, hint = self.for_command_line()
        if words not in message:
            self.args = (f"{words}: {self}",)
            self._written = self._written and (f"{words}: {message}", hint)

    def end_with(self, words: str) -> None:
        """Put words in parentheses after the message."""
        message, hint = self.for_command_line()
        self.args, self._written = (f"{self.message} ({words})",), (f"{message} ({words})", hint)

    def tell_python(self, keywords_of: Callable[[str], str]) -> None:
        """Name keywords in place of options, and let the message end with the hint."""
        if self._written is not None:
            return
        self._written = str(self), self.hint
        self.hint = self.hint and keywords_of(self.hint)
        text = keywords_of(str(self))
        self.args = (text if self.hint is None else f"{text}\nhint: {self.hint}",)


class UsageError(SsdctlError):
    exit_code = ExitCode.USAGE


def missing_package(name: str | None, *packages: str) -> UsageError:
    """Return the error for an optional package that cannot be imported.

    The hint names packages, not an extra: it also works if ssdctl itself is on no index.
    """
    return UsageError(
        f"the package {name} is not installed", hint=f"pip install {' '.join(packages)}"
    )


def import_package(name: str, *packages: str) -> Any:
    """Import a module of an optional package; `packages` are to be installed for it, else `name`.

    Raises:
        UsageError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_package(error.name, *(packages or [name])) from None


class DataError(SsdctlError):
    exit_code = ExitCode.DATA


class NetworkError(SsdctlError):
    exit_code = ExitCode.NETWORK


class IntegrityError(SsdctlError):
    exit_code = ExitCode.INTEGRITY


class DiskError(SsdctlError):
    exit_code = ExitCode.DISK


class NonFiniteError(SsdctlError):
    exit_code = ExitCode.NON_FINITE


class DistributedError(SsdctlError):
    exit_code = ExitCode.DISTRIBUTED


class WorseError(SsdctlError):
    exit_code = ExitCode.WORSE


class Stopped(SsdctlError):  # noqa: N818 - not a failure: the run was stopped by request
    exit_code = ExitCode.STOPPED


class Interrupted(SsdctlError):  # noqa: N818 - as above
    exit_code = ExitCode.INTERRUPTED
