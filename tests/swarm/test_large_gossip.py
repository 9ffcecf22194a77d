"""Gossip in a swarm that is too large for each peer to know all: who hears of a ledger, and how much is asked in a turn."""

from __future__ import annotations

from dataclasses import replace

from peerd.policy.step.groups import mates_to_tell
from peerd.policy.step.roster import leader_of
from peerd.policy.swarm.spreading import MOST_IN_A_TURN, MOST_NEWS, PARTNERS, TELLS_ALL, choose_partners
from peerd.table.record import Phase, StageSummary
from tests.swarm.test_gossip import ME, Swarm


async def test_in_a_summarised_swarm_a_ledger_goes_to_the_leader_of_my_group_and_rests_before_others_hear_it() -> None:
    swarm = Swarm(130, num_stages=1, group_size=16)
    swarm.client.answering.set()
    mine = swarm.membership.live().mine
    assert mine is not None
    summary = StageSummary(peers=131, trainers=0, queue=0, throughput=1.0, held=0)
    swarm.membership.absorb([swarm.row(0, version=2, summary=summary)])
    live = swarm.membership.live()
    assert live.is_summarised
    waiting = mates_to_tell(mine, live.members(0, 0), 16)
    for done in (1, 3):
        swarm.change(False, done=done)
        await swarm.settle()
    assert {peer for peer, _ in swarm.client.told} == {leader_of(waiting)} - {ME.peer}
    swarm.client.told.clear()
    swarm.change(True, phase=Phase.AVERAGED)
    await swarm.settle()
    assert len(swarm.client.told) > 1
    assert len({*choose_partners(live, 1)}) == PARTNERS


async def test_in_a_large_swarm_what_changed_here_becomes_news_though_my_announcement_is_not_due() -> None:
    """Nobody is called for a section that was fetched. Others would hear of it with the next announcement, minutes later among hundreds."""
    swarm = Swarm(TELLS_ALL + 1, num_stages=1)
    swarm.client.answering.set()
    swarm.gossip._publish_and_store()
    assert swarm.mine.mine is not None
    before = swarm.membership.raws[ME.peer].record
    swarm.gossip._publish_and_store()
    assert swarm.membership.raws[ME.peer].record == before
    swarm.mine.mine = replace(swarm.mine.mine, sections=2)
    swarm.gossip._publish_and_store()
    assert swarm.membership.raws[ME.peer].record.sections == 2


async def test_a_full_answer_lets_the_next_partner_be_asked_at_once() -> None:
    swarm = Swarm(MOST_NEWS + 1)
    swarm.gossip._partners = [other.peer for other in swarm.others]
    swarm.client.answers = [swarm.row(number, version=2) for number in range(MOST_NEWS)]
    await swarm.gossip._ask_for_news()
    assert len(swarm.client.asked) == MOST_IN_A_TURN
    swarm.client.answers.pop()
    await swarm.gossip._ask_for_news()
    assert len(swarm.client.asked) == MOST_IN_A_TURN + 1
