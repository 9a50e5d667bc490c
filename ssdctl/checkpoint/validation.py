"""Validate what a checkpoint contains before anything of its size is allocated.

A checkpoint is an untrusted file: a few bytes of it can describe a tensor, a network or a number of
any size. Here everything is bound to the bytes that the file really has.
"""

from __future__ import annotations

import errno
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ssdctl.checkpoint.format import MAX_COUNT, Payload
from ssdctl.checkpoint.pickled_storages import check_storages
from ssdctl.data.classes import ClassName
from ssdctl.errors import IntegrityError
from ssdctl.files import disk_error
from ssdctl.runtime.printable import listed

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
SHOWN = 6  # differences named in a message


def read_fields(payload: Any) -> Payload:
    """Return the fields of a checkpoint, checked.

    Raises:
        ValueError: One is missing, has another type or is out of bounds.
    """
    fields = msgspec.convert(payload, Payload)
    for key in ("data.root", "data.store"):
        value = fields.config.get(key)
        if value is not None and (not isinstance(value, str) or "\0" in value):
            raise ValueError(f"config: {key} is not a path")
    check_classes(fields.classes, fields.architecture.num_classes)
    for values in fields.optimizer.state.values():
        if not all(is_plain_tensor(v) for v in values.values() if isinstance(v, Tensor)):
            raise ValueError("optimizer: a tensor is not dense numbers")
    return fields


def check_classes(classes: Sequence[ClassName], num_classes: int) -> None:
    """Raise ValueError if the classes are not those of a network of `num_classes` outputs."""
    if len(classes) + 1 != num_classes:
        raise ValueError(
            f"{len(classes)} classes, but architecture.num_classes is {num_classes} with the "
            "background"
        )
    if any(c.id is not None and abs(c.id) > MAX_COUNT for c in classes):
        raise ValueError("classes: an id is out of bounds")


def is_statistics(value: object) -> bool:
    """Return whether a value is None, or a list of plain tensors for each rank."""
    return value is None or (
        isinstance(value, list)
        and all(isinstance(rank, list) and all(map(is_plain_tensor, rank)) for rank in value)
    )


def is_state(value: object) -> bool:
    """Return whether a value is a state dict of plain tensors."""
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and is_plain_tensor(tensor) for name, tensor in value.items()
    )


def is_plain_tensor(value: object) -> bool:
    """Return whether a value is a dense tensor of real numbers that are all in the file.

    Sparse, quantized, complex and meta tensors are not; nor are those that repeat few numbers by
    a stride of 0 and would grow when they are copied.
    """
    return (
        isinstance(value, Tensor)
        and type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and value.device.type == "cpu"
        and (value.is_floating_point() or value.dtype in INTEGERS)
        and value.numel() * value.element_size() <= value.untyped_storage().nbytes()
    )


def check_zip(path: Path) -> None:
    """Check that a file is a complete zip of stored entries with correct CRCs, and that its
    tensors are as large as they are described.

    Raises:
        IntegrityError: It is not; or its entries are larger than the file.
        DiskError: It cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            if any(e.compress_type != zipfile.ZIP_STORED for e in entries):
                raise zipfile.BadZipFile("it has compressed entries, which torch.save never writes")
            total = sum(max(e.file_size, e.compress_size) for e in entries)
            if total > path.stat().st_size:
                raise zipfile.BadZipFile("its entries are larger than the file")
            damaged = archive.testzip()
            if damaged is None:
                check_storages(archive)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: of a damaged directory
            raise disk_error(error, path, "reading") from None
        raise _not_a_checkpoint(path, error) from None
    except Exception as error:  # zipfile raises a dozen kinds on a broken directory
        raise _not_a_checkpoint(path, error) from None
    if damaged is not None:
        raise IntegrityError(f"{path}: damaged: the CRC of {damaged} is wrong")


def _not_a_checkpoint(path: Path, error: Exception) -> IntegrityError:
    return IntegrityError(
        f"{path}: not a checkpoint, or a damaged one: {error}",
        hint="an earlier one may be intact: look in the run's checkpoints/",
    )


Shape = tuple[int, ...]


def shape_differences(expected: Mapping[str, Shape], shapes: Mapping[str, Shape]) -> list[str]:
    """Return how the shapes of a file's weights differ from those of a network."""
    wrong = [f"missing {name}" for name in expected if name not in shapes]
    wrong += [f"unexpected {name}" for name in shapes if name not in expected]
    wrong += [
        f"{name} is {shapes[name]}, not {shape}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    return wrong


def refuse_differences(differences: Sequence[str], path: Path) -> None:
    """Raise IntegrityError if there are differences; name the first ones."""
    if differences:
        raise IntegrityError(
            f"{path}: does not fit the network: {listed(differences, SHOWN, '; ')}",
            hint="another --backbone, --extra-norm or dataset may be the one that it belongs to",
        )
