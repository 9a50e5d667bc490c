"""Find the tests that start processes or train, from what their code names."""

from __future__ import annotations

import inspect
import multiprocessing
import subprocess
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest

RUN_OPTION = "--backbone-weights"  # part of conftest.TINY_RUN


def starts_processes(item: pytest.Function) -> bool:
    """Return whether a test, a fixture of it or a test helper that they call names `subprocess`,
    or the options of a run (`TINY_RUN`): its evaluations start processes."""
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    functions = [item.function, *(d.func for definitions in fixtures for d in definitions)]
    seen: set[FunctionType] = set()
    return any(_names_subprocess(function, seen) for function in functions)


def _names_subprocess(function: Any, seen: set[FunctionType]) -> bool:
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType) or function in seen:
        return False
    seen.add(function)
    if function.__module__.startswith(("ssdctl.", "_pytest.", "pytest")):
        return False
    values = [function.__globals__.get(name) for name in _names(function.__code__)]
    if any(value is subprocess or value is multiprocessing for value in values):
        return True
    if any(isinstance(value, str | list) and RUN_OPTION in value for value in values):
        return True
    return any(_names_subprocess(value, seen) for value in values)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names in a function and in the functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
