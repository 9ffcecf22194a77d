"""Mates that have lied about an average: what they have to show before they count again (hole 55)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peerd.policy.step.probation import REMEMBERED, STEPS_TO_SHOW, Probation
from peerd.table.record import Lineage, PeerId, PeerRecord, Phase
from tests.strategies import member

ME, LIAR, OTHER = PeerId("me"), PeerId("liar"), PeerId("other")


def at(step: int, name: PeerId = LIAR, **fields: object) -> PeerRecord:
    return replace(member(name), step=step, **fields)  # type: ignore[arg-type]


def steps_until_over(liar_at: dict[int, PeerRecord], early: frozenset[int] = frozenset(), last: int = 9) -> int | None:
    """The step of this peer at which the probation ends. `liar_at`: other records of the liar than one that goes along."""
    seen = Probation()
    seen.begin(LIAR)
    for step in range(last):
        for _look in range(2):
            stays, ends = seen.look(at(step, ME), (liar_at.get(step, at(step)), at(step, OTHER)), (LIAR,) if step in early else ())
            assert [*stays, *ends] == [LIAR]
            if ends:
                return step
    return None


def test_hole_55_a_mate_that_lied_goes_from_one_step_to_the_next_with_the_others_before_it_counts_again() -> None:
    assert steps_until_over({}) == STEPS_TO_SHOW
    assert steps_until_over({0: at(0, phase=Phase.AVERAGED)}) == STEPS_TO_SHOW


def test_hole_55_it_begins_anew_when_it_tells_an_average_that_nobody_else_tells() -> None:
    assert steps_until_over({}, early=frozenset({1})) == 2 + STEPS_TO_SHOW
    assert steps_until_over({}, early=frozenset(range(9))) is None


@pytest.mark.parametrize("elsewhere", [at(0), at(1, phase=Phase.JOINING), at(1, lineage=Lineage(0, b"astray"))])
def test_hole_55_a_step_in_which_it_was_elsewhere_breaks_the_row(elsewhere: PeerRecord) -> None:
    assert steps_until_over({1: elsewhere}) == 2 + STEPS_TO_SHOW


def test_others_are_not_looked_at_and_so_many_are_remembered() -> None:
    seen = Probation()
    assert seen.look(at(0, ME), (at(0), at(0, OTHER)), ()) == ([], [])
    for number in range(REMEMBERED + 1):
        seen.begin(PeerId(f"liar {number}"))
    mates = [at(0, PeerId(f"liar {number}")) for number in range(REMEMBERED + 1)]
    assert seen.look(at(0, ME), mates, ())[0] == [mate.peer for mate in mates[1:]]
