"""Gossip: what goes out at once, what waits, and what a large swarm asks for instead. The other peers are on paper."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.errors import PeerGoneError
from peerd.policy.step.groups import mates_to_tell
from peerd.policy.swarm.spreading import ANNOUNCED_TO, MOST_PAUSE, PARTNERS, STORED_EVERY, TELLS_ALL
from peerd.swarm.directory import Directory
from peerd.swarm.gossip import FEW_STRANGERS, MOST_ON_THEIR_WAY, UNHURRIED_S, Gossip
from peerd.swarm.identity import Identity
from peerd.swarm.liveness import Liveness
from peerd.swarm.membership import Membership
from peerd.swarm.signed import SignedRecord, sign_record
from peerd.table.record import PeerId, PeerRecord, Phase, RawRecord, RunId, Suspicion
from peerd.wire.swarm_client import SwarmClient
from tests.swarm.fixed_row import FixedRow

RUN = RunId("a" * 32)
PERIOD_S = 5.0
ME = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))


@dataclass
class Client:
    """Takes everything; answers when it is let."""

    told: list[tuple[PeerId, RawRecord]] = field(default_factory=list)
    asked: list[tuple[PeerId, Sequence[bytes]]] = field(default_factory=list)
    tables: list[PeerId] = field(default_factory=list)
    answers: list[RawRecord] = field(default_factory=list)
    rows: list[RawRecord] = field(default_factory=list)
    replies: list[RawRecord] = field(default_factory=list)
    """What comes back when this peer tells something."""
    gone: bool = False
    answering: asyncio.Event = field(default_factory=asyncio.Event)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def tell(self, peer: PeerId, records: Sequence[RawRecord], _timeout_s: float) -> tuple[RawRecord, ...]:
        self.told.append((peer, records[0]))
        await self.answering.wait()
        return tuple(self.replies)

    async def table(self, peer: PeerId, _timeout_s: float) -> AsyncIterator[tuple[RawRecord, ...]]:
        self.tables.append(peer)
        self.was_asked.set()
        yield tuple(self.rows)

    async def ask_for_news(self, peer: PeerId, known: Sequence[bytes], _timeout_s: float) -> tuple[RawRecord, ...]:
        self.asked.append((peer, known))
        self.was_asked.set()
        if self.gone:
            raise PeerGoneError("nobody there")
        return tuple(self.answers)


@dataclass
class Stores:
    """The directory's and the liveness's ends."""

    stored: list[SignedRecord] = field(default_factory=list)
    failed: list[PeerId] = field(default_factory=list)
    num_reads: int = 0
    was_told: asyncio.Event = field(default_factory=asyncio.Event)

    def store_soon(self, _run: RunId, signed: SignedRecord) -> None:
        self.stored.append(signed)

    async def read_records(self, _run: RunId, _stages: Sequence[int]) -> list[RawRecord]:
        self.num_reads += 1
        return []

    def report_failure(self, peer: PeerId) -> None:
        self.failed.append(peer)
        self.was_told.set()


class Swarm:
    def __init__(self, num_others: int, num_stages: int = 2, group_size: int = 0) -> None:
        self.num_stages = num_stages
        self.mine = FixedRow(PeerRecord(peer=ME.peer, incarnation=1, phase=Phase.ACCUMULATING))
        self.membership = Membership(ME, RUN, ttl_s=15.0, row=self.mine)
        self.client, self.stores = Client(), Stores()
        self.gossip = Gossip(
            self.membership,
            cast(SwarmClient, self.client),
            cast(Directory, self.stores),
            cast(Liveness, self.stores),
            PERIOD_S,
            num_stages,
            group_size,
        )
        self.others = [Identity(Ed25519PrivateKey.from_private_bytes(n.to_bytes(32, "big"))) for n in range(1, num_others + 1)]
        self.membership.publish()
        self.membership.absorb([self.row(n) for n in range(num_others)])
        for other in self.others:
            self.membership.called_by(other.peer)

    def row(self, number: int, **fields: object) -> RawRecord:
        other = self.others[number]
        record = PeerRecord(peer=other.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING, stage=number % self.num_stages)
        return sign_record(replace(record, **fields), other, RUN).raw  # type: ignore[arg-type]

    def change(self, everybody: bool, urgent: bool = True, **fields: object) -> None:
        assert self.mine.mine is not None
        self.mine.mine = replace(self.mine.mine, **fields)  # type: ignore[arg-type]
        self.membership.publish()
        self.gossip.push(everybody=everybody, urgent=urgent)

    async def settle(self) -> None:
        """Let everything run that can run now."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def has_told(self, times: int) -> None:
        """Wait until so many words have gone out, then let everything run that can."""
        async with asyncio.timeout(60.0):
            while len(self.client.told) < times:  # noqa: ASYNC110 - it tells nobody
                await asyncio.sleep(0.001)
        await self.settle()


async def test_a_change_of_phase_goes_to_everybody_at_once_and_the_next_does_not_wait_for_the_answer() -> None:
    swarm = Swarm(3)
    for phase in (Phase.AVERAGING, Phase.AVERAGED):
        swarm.change(True, phase=phase)
        await swarm.settle()
    assert [peer for peer, _ in swarm.client.told].count(swarm.others[0].peer) == 2
    assert len(swarm.client.told) == 6


async def test_so_many_are_on_their_way_to_one_peer_and_what_came_since_goes_out_as_one() -> None:
    swarm = Swarm(1)
    for step in range(MOST_ON_THEIR_WAY + 4):
        swarm.change(True, step=step)
        await swarm.settle()
    assert len(swarm.client.told) == MOST_ON_THEIR_WAY
    swarm.client.answering.set()
    await swarm.settle()
    assert len(swarm.client.told) == MOST_ON_THEIR_WAY + 1
    assert swarm.client.told[-1][1] == swarm.membership.raws[ME.peer].raw


async def test_news_of_my_ledger_go_to_my_stage_and_wait_for_more() -> None:
    swarm = Swarm(4)
    mates = sorted(swarm.others[number].peer for number in (0, 2))
    for done in (1, 3, 7):
        swarm.change(False, urgent=False, done=done)
    assert swarm.client.told == []
    await swarm.has_told(2)
    assert sorted(peer for peer, _ in swarm.client.told) == mates
    assert {raw for _, raw in swarm.client.told} == {swarm.membership.raws[ME.peer].raw}
    swarm.client.answering.set()
    await swarm.settle()
    swarm.change(False, urgent=False, done=15)
    swarm.change(False, done=31)
    await swarm.settle()
    assert sorted(peer for peer, _ in swarm.client.told[2:]) == mates, "what completes the step does not wait"
    await asyncio.sleep(0.05)
    assert len(swarm.client.told) == 4, "and takes the other news along"


async def test_what_nobody_waits_for_goes_to_everybody_a_moment_later_also_where_my_stage_hears_something_before() -> None:
    swarm = Swarm(3)
    swarm.client.answering.set()
    swarm.change(True, urgent=False, step=1)
    swarm.change(False, step=1, done=1)
    await swarm.settle()
    assert len(swarm.client.told) == 2
    await swarm.has_told(5)
    assert sorted(peer for peer, _ in swarm.client.told[2:]) == sorted(other.peer for other in swarm.others)
    swarm.change(True, urgent=False, step=2)
    swarm.change(True, phase=Phase.AVERAGED)
    await swarm.has_told(8)
    await asyncio.sleep(2 * UNHURRIED_S)
    assert len(swarm.client.told) == 8


async def test_what_i_think_of_others_goes_out_at_once_but_not_often_in_a_row() -> None:
    swarm = Swarm(3)
    swarm.client.answering.set()
    for _ in range(5):
        swarm.gossip.tell_calmly()
        await asyncio.sleep(0.01)
    assert len(swarm.client.told) == 3
    await swarm.has_told(6)
    assert len(swarm.client.told) == 6
    assert {raw for _, raw in swarm.client.told[3:]} == {swarm.membership.raws[ME.peer].raw}, "all that was new by then"
    swarm.gossip.tell_calmly()
    swarm.change(True, phase=Phase.AVERAGED)
    await swarm.settle()
    assert len(swarm.client.told) == 9, "a change of phase does not wait for it"


async def test_a_change_of_phase_takes_waiting_news_along() -> None:
    swarm = Swarm(2)
    swarm.change(True, phase=Phase.AVERAGING)
    swarm.change(False, urgent=False, done=1)
    swarm.change(True, phase=Phase.AVERAGED)
    await asyncio.sleep(0.05)
    assert len(swarm.client.told) == 4


async def test_whoever_asks_for_news_gets_what_it_does_not_name() -> None:
    swarm = Swarm(3)
    told = swarm.gossip.news(swarm.others[0].peer, [])
    assert set(told) == {signed.raw for signed in swarm.membership.raws.values()}
    assert swarm.gossip.news(swarm.others[0].peer, frozenset(swarm.membership.news.tags(0.0))) == []


@pytest.mark.parametrize(("num_others", "stored"), [(TELLS_ALL - 1, 1), (TELLS_ALL, 0)])
async def test_an_announcement_goes_to_all_of_a_small_swarm_and_to_a_few_of_a_larger_one(num_others: int, stored: int) -> None:
    """In the larger one the directory keeps others of my stage."""
    swarm = Swarm(num_others)
    swarm.gossip._partners = [other.peer for other in swarm.others]
    swarm.gossip._publish_and_store()
    await swarm.settle()
    mine = swarm.membership.raws[ME.peer].record
    assert len(swarm.client.told) == (num_others if num_others < TELLS_ALL else ANNOUNCED_TO)
    assert len(swarm.stores.stored) == stored
    swarm.gossip._publish_and_store()
    assert len(swarm.stores.stored) == stored
    swarm.gossip._stored_s -= (STORED_EVERY * mine.periods - 0.4) * PERIOD_S
    swarm.gossip._announced_s -= (mine.periods - 0.4) * PERIOD_S
    swarm.gossip._publish_and_store()
    assert len(swarm.stores.stored) == 2 * stored


async def test_in_a_larger_swarm_i_ask_around_and_look_after_who_does_not_answer() -> None:
    swarm = Swarm(TELLS_ALL + 4)
    swarm.membership.news._period_s = 0.1
    swarm.client.answers = [swarm.row(0, version=2, step=7)]
    asking = asyncio.ensure_future(swarm.gossip._ask_around())
    await swarm.client.was_asked.wait()
    await swarm.settle()
    assert swarm.membership.find(swarm.others[0].peer).step == 7  # type: ignore[union-attr]
    assert len(swarm.client.asked[0][1]) == TELLS_ALL + 5  # what rose lately is all that there is
    swarm.client.gone = True
    await swarm.stores.was_told.wait()
    assert swarm.stores.failed[0] in {other.peer for other in swarm.others}
    asking.cancel()


async def test_in_a_larger_swarm_many_strangers_are_compared_with_the_table_of_another_peer_but_not_all_the_time() -> None:
    swarm = Swarm(TELLS_ALL + 4)
    swarm.membership.news._period_s = 0.01
    newcomers = [Identity(Ed25519PrivateKey.from_private_bytes(n.to_bytes(32, "big"))) for n in range(100, 100 + FEW_STRANGERS + 1)]
    rows = [sign_record(PeerRecord(peer=each.peer, incarnation=1, version=1), each, RUN).raw for each in newcomers]
    swarm.membership.absorb(rows[:-1], swarm.others[0].peer)
    assert not swarm.gossip._is_to_compare()
    swarm.membership.absorb(rows[-1:], swarm.others[0].peer)
    asking = asyncio.ensure_future(swarm.gossip._ask_around())
    while len(swarm.client.asked) < 3:
        swarm.client.was_asked.clear()
        await swarm.client.was_asked.wait()
    asking.cancel()
    assert len(swarm.client.tables) == 1


async def test_in_a_small_swarm_i_ask_for_a_whole_table_and_keep_no_partners() -> None:
    swarm = Swarm(TELLS_ALL - 1)
    swarm.gossip._period_s = 0.001
    swarm.client.rows = [swarm.row(0, version=2, step=7)]
    asking = asyncio.ensure_future(swarm.gossip._ask_around())
    await swarm.client.was_asked.wait()
    await swarm.settle()
    asking.cancel()
    assert swarm.membership.find(swarm.others[0].peer).step == 7  # type: ignore[union-attr]
    assert swarm.client.asked == []
    assert swarm.gossip._partners == []


async def test_who_knows_many_announces_itself_when_it_is_due_and_no_sooner() -> None:
    swarm = Swarm(70)
    swarm.membership.publish()
    swarm.gossip._publish_and_store()
    swarm.gossip._publish_and_store()
    assert len(swarm.client.told) == 0  # without partners yet
    announced = swarm.membership.raws[ME.peer].record
    assert announced.periods == 4
    swarm.gossip._announced_s -= (announced.periods - 0.4) * PERIOD_S
    swarm.gossip._publish_and_store()
    assert swarm.membership.raws[ME.peer].record.version == announced.version + 1


async def test_the_directory_is_read_seldom_while_nobody_comes_and_at_once_when_somebody_does() -> None:
    swarm = Swarm(3)
    swarm.gossip._period_s = 0.0
    reading = asyncio.ensure_future(swarm.gossip._read_directory())
    for _ in range(10 * MOST_PAUSE):
        await asyncio.sleep(0)
    seldom = swarm.stores.num_reads
    assert 1 < seldom < 20
    swarm.others.append(Identity(Ed25519PrivateKey.from_private_bytes(b"n" * 32)))
    swarm.membership.absorb([swarm.row(3)])
    await swarm.settle()
    assert swarm.stores.num_reads > seldom + 1
    reading.cancel()


@pytest.mark.parametrize(("whose", "reached"), [(1, 1), (0, 0)], ids=["another's", "its own"])
async def test_a_peer_that_answers_with_a_broken_record_has_answered_unless_the_record_is_its_own(
    whose: int, reached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, told = Swarm(2), list[PeerId]()
    monkeypatch.setattr(swarm.membership, "reached", told.append)
    body, _ = swarm.row(whose, version=2)
    swarm.client.replies = [(body, bytes(64))]
    swarm.client.answering.set()
    await swarm.gossip._send(swarm.others[0].peer)
    assert len(told) == reached
    assert swarm.membership.messages_refused == 1
    assert swarm.stores.failed == []


async def test_hole_35_what_proves_that_a_peer_lies_goes_to_all_within_the_fan_out_and_to_newcomers_with_the_table() -> None:
    swarm = Swarm(3)
    spreading = asyncio.ensure_future(swarm.gossip._telling.run())
    swarm.membership.absorb([swarm.row(0, step=9)])
    await swarm.settle()
    assert {peer for peer, _ in swarm.client.told} == {other.peer for other in swarm.others}
    rows, _ = swarm.gossip.table(swarm.others[1].peer, PeerId(""))
    assert rows[:2] == [swarm.row(0), swarm.row(0, step=9)]
    assert len(rows) == 2 + 3
    spreading.cancel()


async def test_a_peer_that_lost_its_incarnation_hears_the_one_it_had() -> None:
    swarm = Swarm(2)
    own, before = swarm.membership.raws[ME.peer].raw, swarm.row(0)
    assert swarm.gossip.gossip(swarm.others[0].peer, [swarm.row(0, incarnation=0, version=7)]) == [own, before]
    assert swarm.gossip.gossip(swarm.others[0].peer, [swarm.row(0, version=2)]) == [own]


async def test_a_higher_incarnation_under_my_id_fences_me_and_a_suspicion_of_me_is_answered_at_once() -> None:
    swarm = Swarm(2)
    running = asyncio.ensure_future(swarm.gossip.run())
    await swarm.settle()
    mine = swarm.membership.find(ME.peer)
    assert mine is not None
    swarm.membership.absorb([swarm.row(0, version=2, suspects=(Suspicion(ME.peer, *mine.pair),))])
    await swarm.settle()
    answered = swarm.membership.find(ME.peer)
    assert answered is not None
    assert answered.version > mine.version
    assert swarm.mine.fences == []
    swarm.membership.absorb([sign_record(PeerRecord(peer=ME.peer, incarnation=7, version=1), ME, RUN).raw])
    await swarm.settle()
    assert swarm.mine.fences == ["this identity was seen with a higher version"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_of_a_push_the_senders_record_is_read_and_not_those_of_keys_that_it_made() -> None:
    """Thousands would each cost a signature's check. Honest peers push their own, or the two that prove that a peer lies."""
    swarm = Swarm(0)
    sender, *made_up = [Identity(Ed25519PrivateKey.from_private_bytes(n.to_bytes(32, "big"))) for n in range(1, 60)]
    raws = [sign_record(PeerRecord(peer=each.peer, incarnation=1, version=1), each, RUN).raw for each in (sender, *made_up)]
    swarm.gossip.gossip(sender.peer, raws)
    assert swarm.membership.find(sender.peer) is not None
    assert swarm.membership.raws.keys() == {ME.peer, sender.peer}


async def test_in_a_large_stage_a_peer_pushes_to_the_same_few_and_to_its_group_and_the_group_leader() -> None:
    """Each of them is a connection to keep."""
    swarm, told = Swarm(80, num_stages=1, group_size=8), set[PeerId]()
    swarm.client.answering.set()
    members = swarm.membership.live().members(0, 0)
    assert len(members) == 81
    for version in range(60):
        swarm.change(False, queue=version)
        await swarm.settle()
        told |= {peer for peer, _ in swarm.client.told}
        swarm.client.told.clear()
    mine = swarm.membership.live().mine
    assert mine is not None
    group = {m.peer for m in mates_to_tell(mine, members, 8)} - {ME.peer}
    assert group < told
    assert len(told) <= PARTNERS + len(group)
    assert 0 < len(group) <= 16
