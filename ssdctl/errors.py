"""Expected failures and their exit codes.

    SsdctlError                1   base class, never raised itself
    |- UsageError              2   an option, a config, a device or a tool
    |- DataError               3   annotations, images, a dataset folder
    |- NetworkError            4
    |- IntegrityError          5   a hash, an archive, a checkpoint
    |- DiskError               6   no space, no permission
    |- NonFiniteError          7   NaN or infinity in a loss, a gradient or a weight
    |- DistributedError        8   a rank died, hung or disagreed with the others
    |- Stopped                75   a signal; everything is saved, run again to continue
    `- Interrupted           130   a second signal; nothing more was saved

An error is one message: what is wrong, where, and (in `hint`) what to do next. The command line
prints it without a traceback and exits with the code. Any other exception is a bug: exit 1.
"""

from __future__ import annotations


class SsdctlError(Exception):
    """An expected failure: `str(error)` is what is wrong and where, `hint` is what to do next."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint
        self.is_from_all_ranks = False  # the same error was raised on every rank


class UsageError(SsdctlError):
    exit_code = 2


class DataError(SsdctlError):
    exit_code = 3


class NetworkError(SsdctlError):
    exit_code = 4


class IntegrityError(SsdctlError):
    exit_code = 5


class DiskError(SsdctlError):
    exit_code = 6


class NonFiniteError(SsdctlError):
    exit_code = 7


class DistributedError(SsdctlError):
    exit_code = 8


class Stopped(SsdctlError):  # noqa: N818 - not a failure: the run was stopped by request
    exit_code = 75


class Interrupted(SsdctlError):  # noqa: N818 - as above
    exit_code = 130
