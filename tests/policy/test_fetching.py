"""Which mates a peer asks for parts of an average that it lacks."""

from __future__ import annotations

from peerd.policy.step.acts import FetchAverage
from peerd.policy.step.situation import OwnState
from peerd.table.record import AverageId
from tests.policy.test_stepping import averaged, decided, joiner
from tests.strategies import FULL, member


def test_a_joiner_asks_all_mates_that_keep_an_average_for_a_part_of_it_but_those_that_did_not_answer() -> None:
    mates = [member(f"p{number}", step=30 - number % 2, kept_averages=28) for number in range(4)]
    own = OwnState(record=joiner(2), unanswered=frozenset({(mates[3].peer, 2)}))
    act = decided(joiner(2), *mates, member("p4", step=30, kept_averages=4), own=own)
    assert isinstance(act, FetchAverage)
    assert sorted((act.peer, *act.others)) == [mate.peer for mate in mates[:3]]


def test_of_averages_that_differ_in_rounding_parts_of_one_are_asked_for() -> None:
    same = [averaged(f"p{number}", average_id=AverageId(b"a")) for number in range(2)]
    other = averaged("p2", average_id=AverageId(b"b"))
    act = decided(member("p4", done=FULL), *same, other)
    assert isinstance(act, FetchAverage)
    assert sorted((act.peer, *act.others)) == [mate.peer for mate in same]
