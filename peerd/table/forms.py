"""Forms: how the fields of a record travel as plain values, and which bounds a value from the network has to keep.

A form that reads a value out of bounds, or of another type, raises ValueError or TypeError.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter, call
from typing import Any

from peerd.peer_names import check_name

MAX_MICROBATCHES_PER_STEP = 8192
MAX_COUNT = 1 << 62
MAX_LIST = 64
MAX_RUN_LENGTHS = 256


@dataclass(frozen=True, slots=True)
class Form:
    """How one kind of value is read and written."""

    read: Callable[[Any], Any]
    write: Callable[[Any], Any] | None = None
    """None: the value travels as it is."""


def count(most: int = MAX_COUNT, least: int = 0) -> Form:
    """A number between 0 and `most`; one below `least` is read as `least`."""

    def read(value: Any) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise ValueError(f"not a number between 0 and {most}")
        return value

    def read_raised(value: Any) -> int:
        return max(least, read(value))

    return Form(read_raised if least else read)


def whole(most: int) -> Form:
    """A number between -`most` and `most`."""

    def read(value: Any) -> int:
        if type(value) is not int or not -most <= value <= most:
            raise ValueError(f"not a number between {-most} and {most}")
        return value

    return Form(read)


def real(most: float) -> Form:
    """A finite number between 0 and `most`."""

    def read(value: Any) -> float:
        if type(value) not in (int, float) or not 0 <= value <= most:  # false of NaN, too
            raise ValueError(f"not a number between 0 and {most:g}")
        return float(value)

    return Form(read)


def text(most: int) -> Form:
    def read(value: Any) -> str:
        if not isinstance(value, str) or len(value) > most or not value.isprintable():
            raise ValueError(f"not a printable text of at most {most} characters")
        return value

    return Form(read)


def _read_name(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("not a name")
    check_name(value)
    return value


def raw(most: int) -> Form:
    def read(value: Any) -> bytes:
        if not isinstance(value, bytes) or len(value) > most:
            raise ValueError(f"not at most {most} bytes")
        return value

    return Form(read)


def one_of(kind: type[enum.IntEnum]) -> Form:
    read_number = count().read

    def read(value: Any) -> enum.IntEnum:
        return kind(read_number(value))

    return Form(read)


def optional(form: Form) -> Form:
    def read(value: Any) -> Any:
        return None if value is None else form.read(value)

    write_some = form.write
    if write_some is None:
        return Form(read)

    def write(value: Any) -> Any:
        return None if value is None else write_some(value)

    return Form(read, write)


def many(form: Form, kept: int = MAX_LIST) -> Form:
    """A tuple. No more than `kept` values are read; a list of more than MAX_LIST is refused."""

    def read(value: Any) -> tuple[Any, ...]:
        return tuple(map(form.read, as_list(value)[:kept]))

    write_one = form.write
    if write_one is None:
        return Form(read)

    def write(values: tuple[Any, ...]) -> list[Any]:
        return list(map(write_one, values))

    return Form(read, write)


def row(kind: type, *forms: Form) -> Form:
    """A dataclass of two or more fields. It travels as a list, in the order of the fields."""
    values_of = attrgetter(*(entry.name for entry in fields(kind)))
    reads = [form.read for form in forms]

    def read(value: Any) -> Any:
        return kind(*map(call, reads, as_list(value, len(reads))))

    def write(value: Any) -> list[Any]:
        return [each if form.write is None else form.write(each) for form, each in zip(forms, values_of(value), strict=True)]

    return Form(read, write if any(form.write for form in forms) else values_of)


def as_list(value: Any, length: int | None = None) -> list[Any]:
    if not isinstance(value, list) or len(value) > MAX_LIST or (length is not None and len(value) != length):
        raise ValueError("not a list of the right length")
    return value


def _read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("not a truth value")
    return value


def _read_norm(value: Any) -> float:
    if type(value) not in (int, float) or not value >= 0:
        raise ValueError("not a norm")
    return float(value)


def _read_ledger(value: Any) -> int:
    return _read_runs(value) if isinstance(value, list) else int.from_bytes(_ledger_bytes.read(value), "little")


def _read_runs(lengths: list[Any]) -> int:
    bitmap = place = 0
    if len(lengths) > MAX_RUN_LENGTHS or len(lengths) % 2:
        raise ValueError("not a list of the lengths of runs")
    for zeros, ones in zip(lengths[::2], lengths[1::2], strict=True):
        place += _run_length.read(zeros)
        bitmap |= (1 << _run_length.read(ones)) - 1 << place
        place += ones
        if place > MAX_MICROBATCHES_PER_STEP:
            raise ValueError(f"a bitmap of {place} microbatches")
    return bitmap


def _write_ledger(bitmap: int) -> bytes | list[int]:
    """As the lengths of its runs, of zeros and ones in turn, where that is shorter: trainers own ranges, and others hold few of many."""
    lengths, size, rest, whole = list[int](), 3, bitmap, (bitmap.bit_length() + 7) // 8
    while rest:
        zeros = (rest & -rest).bit_length() - 1
        rest >>= zeros
        ones = (rest + 1 & ~rest).bit_length() - 1
        rest >>= ones
        lengths += zeros, ones
        size += sum(1 if length < 128 else 2 if length < 256 else 3 for length in (zeros, ones))
        if size >= whole or len(lengths) > MAX_RUN_LENGTHS:
            return bitmap_to(bitmap)
    return lengths if size < whole else bitmap_to(bitmap)


def bitmap_to(bitmap: int) -> bytes:
    """The lowest bits in the first byte."""
    return bitmap.to_bytes((bitmap.bit_length() + 7) // 8, "little")


_ledger_bytes = raw(MAX_MICROBATCHES_PER_STEP // 8)
_run_length = count(MAX_MICROBATCHES_PER_STEP)
LEDGER = Form(_read_ledger, _write_ledger)
"""A bitmap of microbatches."""
FLAG = Form(_read_flag)
NAME = Form(_read_name)
"""What a peer calls itself (peer_names.py)."""
NORM = Form(_read_norm)
"""A number that is not negative. It may be infinite: something overflowed."""
