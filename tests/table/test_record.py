"""The words of the table: phases and their legal moves, the orders of pairs and lineages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.table.record import TRANSITIONS, Lineage, Phase, check_transition
from tests.strategies import lineages, member


@pytest.mark.parametrize("old", Phase)
@pytest.mark.parametrize("new", Phase)
def test_a_phase_moves_only_as_the_transition_table_allows(old: Phase, new: Phase) -> None:
    if new in TRANSITIONS[old]:
        check_transition(old, new)
    else:
        with pytest.raises(AssertionError, match=f"{old.name} -> {new.name}"):
            check_transition(old, new)


def test_a_joiner_serves_before_it_averages() -> None:
    assert TRANSITIONS[Phase.JOINING] == {Phase.ACCUMULATING}


def test_nobody_averages_again_what_is_averaged() -> None:
    assert Phase.AVERAGING not in TRANSITIONS[Phase.AVERAGED]


def test_every_phase_leads_to_every_other() -> None:
    for start in Phase:
        reached, frontier = {start}, [start]
        while frontier:
            fresh = TRANSITIONS[frontier.pop()] - reached
            reached |= fresh
            frontier += sorted(fresh)
        assert reached == set(Phase)


@given(lineages, lineages)
def test_of_two_lineages_the_one_with_fewer_inexact_steps_is_smaller(one: Lineage, other: Lineage) -> None:
    assert (one < other) == ((one.inexact, one.chain) < (other.inexact, other.chain))


@given(st.tuples(st.integers(0, 3), st.integers(0, 3)), st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_a_new_incarnation_outranks_every_version_of_the_old(one: tuple[int, int], other: tuple[int, int]) -> None:
    first = member("p", incarnation=one[0], version=one[1])
    second = member("p", incarnation=other[0], version=other[1])
    if one[0] > other[0]:
        assert first.pair > second.pair
