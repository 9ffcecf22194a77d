"""Rule 7 (propose): the members of a stage propose in turn, where those before them are mute."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.step.acts import Act, Propose
from peerd.policy.step.roster import is_complete, turns
from peerd.policy.step.situation import OwnState, Situation, StepRules
from peerd.policy.step.stepping import decide
from peerd.table.record import PeerRecord, Phase
from tests.strategies import FULL, NUM_MICROBATCHES, member, view_of

RULES = StepRules(num_stages=2, num_microbatches=NUM_MICROBATCHES, ttl_s=3.0, averaging_s=1.5)


def decided(mine: PeerRecord, *others: PeerRecord, complete_since_s: float | None = None) -> Act:
    return decide(Situation(OwnState(record=mine, complete_since_s=complete_since_s), view_of(mine, *others), 100.0, RULES))


def test_hole_33_where_the_leader_is_mute_the_next_member_proposes_after_two_averaging_times_and_the_third_after_four() -> None:
    members = [member("p0", done=FULL), member("p1"), member("p2")]
    by_turn = [next(m for m in members if m.peer == name) for name in turns(members)]
    for rank, mine in enumerate(by_turn):
        others = [m for m in members if m is not mine]
        for waited_s in (0.0, 2.9, 3.1, 5.9, 6.1):
            act = decided(mine, *others, complete_since_s=100.0 - waited_s)
            assert isinstance(act, Propose) == (waited_s >= 2 * rank * RULES.averaging_s)
        assert is_complete(mine, view_of(mine, *others), NUM_MICROBATCHES)
        assert isinstance(decided(mine, *others), Propose) == (rank == 0)
    mine, other, third = members
    assert not is_complete(mine, view_of(mine, other, replace(third, phase=Phase.AVERAGING)), NUM_MICROBATCHES)
