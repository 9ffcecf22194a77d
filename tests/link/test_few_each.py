"""What one caller has, and what all strangers have together; nothing stays of a caller that has nothing."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.link.few_each import FewEach
from peerd.table.record import PeerId

MOST, MOST_OF_STRANGERS = 3, 4
MEMBERS = {PeerId("a"), PeerId("b")}


@given(st.lists(st.tuples(st.sampled_from("abcde"), st.booleans()), max_size=60))
def test_a_caller_gets_what_is_left_of_its_share_and_a_stranger_what_is_left_of_all_strangers(asked: list[tuple[str, bool]]) -> None:
    shares, held = FewEach(MEMBERS.__contains__), list[tuple[PeerId, ExitStack]]()
    for name, gives_back in asked:
        caller = PeerId(name)
        mine = [each for each in held if each[0] == caller]
        if gives_back and mine:
            held.remove(mine[0])
            mine[0][1].close()
            continue
        of_strangers = sum(other not in MEMBERS for other, _ in held)
        stack = ExitStack()
        has_room = stack.enter_context(shares.by(caller, MOST, MOST_OF_STRANGERS))
        assert has_room == (len(mine) < MOST and (caller in MEMBERS or of_strangers < MOST_OF_STRANGERS))
        if has_room:
            held.append((caller, stack))
        assert (shares.total, shares.num_callers) == (len(held), len({other for other, _ in held}))
        assert shares._of[caller] == sum(other == caller for other, _ in held)
    for _, stack in held:
        stack.close()
    assert (shares.total, shares.num_callers, shares._strangers) == (0, 0, set())


def test_a_stranger_that_has_become_known_leaves_its_room_to_other_strangers() -> None:
    known = set[PeerId]()
    shares = FewEach(known.__contains__)
    with shares.by(PeerId("a"), 1) as first:
        with shares.by(PeerId("b"), 1) as second:
            assert (first, second) == (True, False)
        known.add(PeerId("a"))
        with shares.by(PeerId("b"), 1) as second:
            assert second
    assert shares.total == 0


def test_an_error_in_the_block_gives_back_too() -> None:
    shares = FewEach()
    with pytest.raises(ValueError, match="bad"), shares.by(PeerId("a"), 1):
        raise ValueError("bad")
    assert shares.total == shares.num_callers == 0
