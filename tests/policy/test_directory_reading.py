"""How often a large swarm's directory is read and written, and the pages of its table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.swarm.spreading import (
    KEEPERS,
    MOST_PAUSE,
    PAGE_BYTES,
    PAGE_RECORDS,
    STORED_EVERY,
    TELLS_ALL,
    DirectoryReading,
    is_to_announce,
    is_to_store,
    page,
    periods,
)
from peerd.table.record import PeerId, RawRecord
from peerd.table.view import TTL_PERIODS, LiveView
from tests.strategies import stage_of, view_of


def reads(lives: Sequence[LiveView], num_stages: int) -> list[int]:
    """The periods, from 0, in which who sees these views one after another reads the directory."""
    reading, found = DirectoryReading(lives[0]), []
    for period, live in enumerate(lives):
        reading = reading.after(live, num_stages)
        found += [period] if reading.is_now else []
    return found


SETTLED = view_of(*stage_of(0, 2), *stage_of(1, 2))


def test_the_directory_is_read_ever_more_seldom_until_somebody_comes_or_goes_or_a_stage_has_nobody() -> None:
    assert reads([SETTLED] * 60, 2) == [0, 2, 6, 14, 26, 38, 50]
    for other in (view_of(*stage_of(0, 3), *stage_of(1, 2)), view_of(*stage_of(0, 2), *stage_of(1, 1))):
        assert reads([SETTLED] * 40 + [other] * 5, 2) == [0, 2, 6, 14, 26, 38, 40, 41, 43]
    assert reads([SETTLED] * 5, 3) == [0, 1, 2, 3, 4]
    newer = view_of(*stage_of(0, 2, version=9), *stage_of(1, 2, step=4))
    assert reads([SETTLED] * 30 + [newer] * 10, 2) == reads([SETTLED] * 40, 2)


def test_while_peers_come_the_many_that_are_there_share_the_reading() -> None:
    lives = [view_of(*stage_of(0, 31 + period), *stage_of(1, 1)) for period in range(12)]
    assert reads(lives, 2) == [0, 4, 9]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=80))
def test_the_directory_is_read_as_soon_as_anybody_comes_or_goes_and_never_long_not(sizes: list[int]) -> None:
    lives = [view_of(*stage_of(0, 1 + size), *stage_of(1, 1)) for size in sizes]
    found = reads(lives, 2)
    assert found[0] == 0
    assert all(later - earlier <= MOST_PAUSE for earlier, later in zip(found, [*found[1:], len(lives)], strict=True))
    assert {period for period in range(1, len(lives)) if sizes[period] != sizes[period - 1]} <= set(found)


@given(st.integers(0, 5_000), st.lists(st.floats(-0.2, 0.2), min_size=60, max_size=60))
def test_what_the_directory_has_of_a_peer_never_ends_before_it_is_stored_anew(num_known: int, late: list[float]) -> None:
    every = periods(num_known)
    live = view_of(*stage_of(0, 3, periods=every))
    announced = stored = float("-inf")
    for period, by in enumerate(late):
        now = period + by
        if not is_to_announce(every, now - announced):
            continue
        announced = now
        if is_to_store(live.records[0], live, now - stored):
            assert stored < 0 or now - stored < TTL_PERIODS * every
            assert now - stored > (STORED_EVERY - 1) * every
            stored = now
    assert len(late) - stored < TTL_PERIODS * every


@pytest.mark.parametrize("num_peers", [KEEPERS, TELLS_ALL, TELLS_ALL + 1, 4 * TELLS_ALL])
def test_the_directory_keeps_all_of_a_small_swarm_and_of_a_large_one_a_few_of_each_stage(num_peers: int) -> None:
    live = view_of(*stage_of(0, num_peers))
    kept = [record for record in live.records if is_to_store(record, live, STORED_EVERY)]
    assert len(kept) == (num_peers if num_peers <= TELLS_ALL else KEEPERS)
    assert not any(is_to_store(record, live, STORED_EVERY - 1) for record in live.records)


@given(st.lists(st.tuples(st.integers(0, 999), st.integers(0, 3)), unique_by=lambda row: row[0], max_size=40))
def test_the_pages_of_a_table_are_bounded_and_together_the_table(found: list[tuple[int, int]]) -> None:
    table = [(PeerId(f"{number:03}"), (bytes(size * PAGE_BYTES // 3), b"")) for number, size in sorted(found)]
    after, read = PeerId(""), list[RawRecord]()
    for _ in range(len(table) + 1):
        raws, after = page(table, after)
        assert sum(len(body) for body, _ in raws[:-1]) < PAGE_BYTES
        read += raws
        if not after:
            break
    assert read == [raw for _, raw in table]


def test_a_page_has_so_many_records_at_most_and_the_last_one_says_that_it_is_the_last() -> None:
    table = [(PeerId(f"{number:05}"), (b"", b"")) for number in range(2 * PAGE_RECORDS)]
    assert page(table, PeerId("")) == ([(b"", b"")] * PAGE_RECORDS, table[PAGE_RECORDS - 1][0])
    assert page(table, table[PAGE_RECORDS - 1][0]) == ([(b"", b"")] * PAGE_RECORDS, PeerId(""))
    assert page([], PeerId("")) == page(table, PeerId("~")) == ([], PeerId(""))
