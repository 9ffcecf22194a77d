"""Large stages in states that are drawn: what is asked of them at every look has the same answer as the round that it is asked for."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

from peerd.policy.step.groups import groups_of
from peerd.policy.step.ledger import with_sum
from peerd.policy.step.roster import compose, is_complete, is_whole, union_of, why_inexact
from peerd.table.record import AverageId, PeerRecord, Phase
from tests.policy.test_groups import stage_of, view_of


def drawn(seed: int) -> tuple[list[PeerRecord], int, int, int]:
    """Members in any state, whose ledgers mostly cover the step once; the number of microbatches, the group size, and of sections."""
    draw = random.Random(seed)
    members, number = stage_of(draw.randint(1, 14)), draw.randint(1, 12)
    done = [0] * len(members)
    for index in range(number):
        for _ in range(draw.choices((1, 0, 2), (30, 1, 1))[0]):
            done[draw.randrange(len(members))] |= 1 << index
    phases = draw.choices(
        (Phase.ACCUMULATING, Phase.AVERAGING, Phase.AVERAGED), (30, draw.choice((0, 8)), draw.choice((0, 1))), k=len(members)
    )
    size, num_sections = draw.choice((0, 2, 3, 6)), draw.choice((1, 2, 4))
    members = [
        replace(member, done=own, own_done=own, phase=phase, leaving=draw.random() < 0.1)
        for member, own, phase in zip(members, done, phases, strict=True)
    ]
    for group in groups_of(members, size).values():
        name, sums = AverageId(group[0].peer.encode()), draw.random() < 0.85 and len(group) > 1
        for member in group if sums else ():
            held = draw.getrandbits(num_sections) if draw.random() < 0.6 else 0
            members[members.index(member)] = replace(with_sum(member, name, union_of(group)), sections=held)
    return members, number, size, num_sections


def test_a_stage_is_complete_for_a_member_if_it_could_propose_once_all_others_had_their_turn() -> None:
    found = Counter[bool]()
    for seed in range(400):
        members, number, size, num_sections = drawn(seed)
        for mine in members:
            live = view_of(members, mine.peer)
            roster = compose(mine, live, number, 0, len(members), (), size, num_sections)
            assert is_complete(mine, live, number, size, num_sections) is (roster is not None), seed
            found[roster is not None] += 1
            if roster is not None and (roster.num_sections > 1 or is_whole(roster.entries, number)):
                assert why_inexact(roster.entries, number) is None
    assert min(found.values()) > 100
