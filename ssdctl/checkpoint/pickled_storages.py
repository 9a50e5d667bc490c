"""Check that the tensors of a `.pt` file are not larger than the bytes that the file has for them.

The pickle in the file states the length of each storage. Before version 2.10 or so, PyTorch does
not compare it with the record that holds the bytes, and reads beyond the end of its memory.
"""

from __future__ import annotations

import pickletools
import zipfile
from collections.abc import Callable
from typing import Any

ITEM_BYTES = {
    **dict.fromkeys(("Untyped", "Byte", "Char", "Bool", "QInt8", "QUInt8"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    **dict.fromkeys(("Float", "Int", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
MARK = object()
OPAQUE = object()  # any value that is not part of a storage's description


def check_storages(archive: zipfile.ZipFile) -> None:
    """Compare the lengths that the pickle states with the records' own.

    Raises:
        zipfile.BadZipFile: A storage is larger than its record, or is not described as torch.save
            does it; a name occurs twice.
        Exception: Of any kind, if the pickle is damaged.
    """
    names = [info.filename for info in archive.infolist()]
    if len({name.lower() for name in names}) < len(names):  # PyTorch ignores the case
        raise zipfile.BadZipFile("a name occurs twice in it")
    prefix = names[0].partition("/")[0]
    sizes = {info.filename: info.file_size for info in archive.infolist()}
    for description in _storages(archive.read(f"{prefix}/data.pkl")):
        kind, storage, key, _, length = description
        item_bytes = ITEM_BYTES.get(storage.rpartition(" ")[2].removesuffix("Storage"))
        size = sizes.get(f"{prefix}/data/{key}")
        if kind != "storage" or item_bytes is None or size is None or length * item_bytes > size:
            raise zipfile.BadZipFile(f"its tensor {key!r} is not in the file as it is described")


def _storages(pickle: bytes) -> list[tuple[Any, Any, Any, Any, Any]]:
    """Return the storages that a pickle refers to, without building any of its objects."""
    found = []
    stack: list[Any] = []
    memo: dict[Any, Any] = {}
    for opcode, argument, _ in pickletools.genops(pickle):
        name = opcode.name
        if name in ("PROTO", "STOP"):
            continue
        if name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in LITERALS:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(OPAQUE)
        elif name == "BINPERSID":
            description = stack.pop()
            _, storage, key, _, length = description
            if type(storage) is not str or type(key) is not str or type(length) is not int:
                raise zipfile.BadZipFile("it has a storage without a name or a length")
            found.append(description)
            stack.append(OPAQUE)
        elif name in STACK_EFFECTS:
            STACK_EFFECTS[name](stack)
        else:
            raise zipfile.BadZipFile(f"its pickle has the operation {name}; torch.save has not")
    return found


def _pop_to_mark(stack: list[Any]) -> list[Any]:
    values = []
    while (value := stack.pop()) is not MARK:
        values.append(value)
    return values[::-1]


def _tuple_of(count: int) -> Callable[[list[Any]], None]:
    def build(stack: list[Any]) -> None:
        values = [stack.pop() for _ in range(count)][::-1]
        stack.append(tuple(values))

    return build


def _pops(count: int, *, results: int = 0) -> Callable[[list[Any]], None]:
    def pop(stack: list[Any]) -> None:
        for _ in range(count):
            stack.pop()
        stack.extend([OPAQUE] * results)

    return pop


# The operations that torch's own restricted unpickler has.
LITERALS = {"BINUNICODE", "GLOBAL", "BININT", "BININT1", "BININT2", "LONG1"}
CONSTANTS = {
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BINFLOAT", "SHORT_BINSTRING"),
}
# What the other operations take from the stack and put on it.
STACK_EFFECTS: dict[str, Callable[[list[Any]], object]] = {
    "MARK": lambda stack: stack.append(MARK),
    "TUPLE": lambda stack: stack.append(tuple(_pop_to_mark(stack))),
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _pops(1),
    "APPENDS": _pop_to_mark,
    "SETITEM": _pops(2),
    "SETITEMS": _pop_to_mark,
    "BUILD": _pops(1),
    "REDUCE": _pops(2, results=1),
    "NEWOBJ": _pops(2, results=1),
}
