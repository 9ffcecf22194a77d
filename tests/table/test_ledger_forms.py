"""How bitmaps of microbatches travel in records: as bytes, or where that is shorter as the lengths of their runs."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from peerd.table.forms import LEDGER, MAX_MICROBATCHES_PER_STEP, MAX_RUN_LENGTHS, bitmap_to

MICROBATCHES = 4096
lengths = st.integers(1, MAX_MICROBATCHES_PER_STEP // 64)


def written(bitmap: int) -> Any:
    assert LEDGER.write is not None
    return LEDGER.write(bitmap)


def of_runs(runs: list[tuple[int, int]]) -> int:
    bitmap = place = 0
    for zeros, ones in runs:
        bitmap |= (1 << ones) - 1 << place + zeros
        place += zeros + ones
    return bitmap


@given(st.integers(0, (1 << MAX_MICROBATCHES_PER_STEP) - 1) | st.lists(st.tuples(lengths, lengths), max_size=32).map(of_runs))
@example(0)
@example((1 << MAX_MICROBATCHES_PER_STEP) - 1)
@example(1 << MAX_MICROBATCHES_PER_STEP - 1)
@example(of_runs([(8, 8)] * (MAX_RUN_LENGTHS // 2)))
@example(of_runs([(8, 8)] * (MAX_RUN_LENGTHS // 2 + 1)))
def test_any_bitmap_is_read_as_it_was_and_takes_no_more_than_its_bytes(bitmap: int) -> None:
    value = msgpack.unpackb(msgpack.packb(written(bitmap)), max_array_len=MAX_RUN_LENGTHS)
    assert LEDGER.read(value) == LEDGER.read(bitmap_to(bitmap)) == bitmap
    assert len(msgpack.packb(value)) <= len(msgpack.packb(bitmap_to(bitmap)))


def test_the_ledgers_of_one_among_hundreds_take_few_bytes() -> None:
    apart = sum(1 << index for index in random.Random(0).sample(range(MICROBATCHES), 14))
    group = of_runs([(115, 13)] * 32)
    sizes = {len(bitmap_to(bitmap)): len(msgpack.packb(written(bitmap))) for bitmap in (0x3FFF << 3000, apart, group)}
    assert sizes == {377: 5, 498: 49, 512: 67}


@pytest.mark.parametrize(
    "value",
    [
        [1],
        [0, 1] * (MAX_RUN_LENGTHS // 2 + 1),
        [0, MAX_MICROBATCHES_PER_STEP + 1],
        [MAX_MICROBATCHES_PER_STEP, 1],
        [-1, 5],
        [5, -1],
        [0, True],
        [0, 1.0],
        [0, None],
        bytes(MAX_MICROBATCHES_PER_STEP // 8 + 1),
        7,
        None,
    ],
)
def test_what_is_no_bitmap_is_refused(value: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        LEDGER.read(value)
