"""Functions of the Python API: clear errors for wrong keywords, and hints in messages."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ssdctl.errors import UsageError, hints_in_messages

P = ParamSpec("P")
R = TypeVar("R")


def public(instead_of: Callable[[str], str | None]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function raise UsageError for a keyword that it does not have.

    Args:
        instead_of: Returns what to write instead of a keyword; None: nothing is known.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        code = function.__code__
        keywords = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            with hints_in_messages():
                for name in kwargs.keys() - set(keywords):
                    raise UsageError(
                        f"{function.__name__}: it has no keyword {name!r}", hint=instead_of(name)
                    )
                return function(*args, **kwargs)

        return call

    return decorate
