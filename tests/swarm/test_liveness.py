"""Whoever does not answer a re-dial is suspect; who was wrong about that waits longer the next time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.errors import PeerGoneError, UnansweredError
from peerd.policy.swarm.suspicion import LATE, AnswerTimes
from peerd.swarm import liveness as liveness_module
from peerd.swarm.identity import Identity
from peerd.swarm.liveness import REDIAL_TIMEOUT_S, Liveness
from peerd.swarm.membership import Membership
from peerd.swarm.signed import sign_record
from peerd.table.forms import MAX_COUNT
from peerd.table.record import PeerId, PeerRecord, Phase, RawRecord, RunId, Suspicion
from peerd.wire.swarm_client import SwarmClient
from tests.swarm.fixed_row import FixedRow

RUN = RunId("a" * 32)
ME, MATE, LIAR = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(3))


@dataclass
class Lines:
    """Connections over which nothing comes back. To whom each that was given up led."""

    answered_s: dict[PeerId, float] = field(default_factory=dict)
    refused_s: dict[PeerId, float] = field(default_factory=dict)
    given_up: list[PeerId] = field(default_factory=list)
    answer_times: AnswerTimes = field(default_factory=AnswerTimes)

    async def hang_up(self, peer: PeerId) -> None:
        self.given_up.append(peer)

    async def leave_address(self, peer: PeerId) -> None:
        await self.hang_up(peer)


@dataclass
class Silent:
    """Nobody answers; how long each was waited for."""

    waited_s: list[float] = field(default_factory=list)

    async def gossip(self, _peer: PeerId, _records: Sequence[RawRecord], timeout_s: float) -> tuple[RawRecord, ...]:
        self.waited_s.append(timeout_s)
        raise PeerGoneError("no answer")

    async def reaches(self, _witness: PeerId, _accused: PeerId, _within_s: float) -> bool:
        return False


async def test_a_suspicion_that_proves_wrong_makes_the_next_slower_and_one_of_a_peer_that_came_back_does_not() -> None:
    row = FixedRow(PeerRecord(peer=ME.peer, incarnation=1, phase=Phase.ACCUMULATING))
    membership, client = Membership(ME, RUN, ttl_s=60.0, row=row), Silent()
    liveness = Liveness(membership, cast(SwarmClient, client), {}, Lines())
    membership.publish()
    for number, pair in enumerate(((1, 1), (2, 1), (2, 2)), start=1):  # it dies and comes back, then it lives after all
        record = PeerRecord(peer=MATE.peer, incarnation=pair[0], version=pair[1], phase=Phase.ACCUMULATING)
        membership.absorb([sign_record(record, MATE, RUN).raw])
        membership.publish()
        membership.reached(MATE.peer)
        liveness.report_failure(MATE.peer)
        await asyncio.gather(*liveness._probes.values())
        assert liveness.faults_seen == number
        assert (await membership.word.due()).tell
    first, second, third = client.waited_s
    assert first == second == REDIAL_TIMEOUT_S
    assert 1.5 * REDIAL_TIMEOUT_S < third <= 2 * REDIAL_TIMEOUT_S


@pytest.mark.parametrize("leaving", [False, True])
async def test_a_peer_that_goes_on_not_to_answer_is_told_of_once(leaving: bool, capsys: pytest.CaptureFixture[str]) -> None:
    membership = Membership(ME, RUN, ttl_s=60.0)
    record = PeerRecord(peer=MATE.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING, leaving=leaving)
    membership.absorb([sign_record(record, MATE, RUN).raw])
    liveness = Liveness(membership, cast(SwarmClient, Silent()), {}, Lines())
    for _ in range(3):
        liveness.report_failure(MATE.peer)
        await asyncio.gather(*liveness._probes.values())
    assert liveness.faults_seen == (not leaving)
    assert capsys.readouterr().out.count("a peer has left" if leaving else "suspect: no answer") == 1


@dataclass
class Behind:
    """Answers do not come in time, while bytes of the same peer come for as long as `left` questions."""

    left: int
    error: PeerGoneError = field(default_factory=lambda: UnansweredError("no answer"))
    heard_s: dict[PeerId, float] = field(default_factory=dict)
    asked: int = 0

    async def gossip(self, peer: PeerId, _records: Sequence[RawRecord], timeout_s: float) -> tuple[RawRecord, ...]:
        self.asked += 1
        await asyncio.sleep(0.01)
        if self.asked <= self.left:
            self.heard_s[peer] = time.monotonic()
        raise self.error


@pytest.mark.parametrize("left", [0, 1, 3])
async def test_a_peer_from_which_bytes_come_is_asked_again_and_suspected_once_none_do(left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "ASK_AGAIN_S", 0.0)
    membership, client = Membership(ME, RUN, ttl_s=60.0), Behind(left)
    membership.absorb([sign_record(PeerRecord(peer=MATE.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING), MATE, RUN).raw])
    client.heard_s[MATE.peer] = time.monotonic() - 1.0
    liveness = Liveness(membership, cast(SwarmClient, client), client.heard_s, Lines())
    liveness.report_failure(MATE.peer)
    await asyncio.gather(*liveness._probes.values())
    assert (client.asked, liveness.faults_seen) == (left + 1, 1)


async def test_a_record_that_rises_meanwhile_ends_the_asking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "ASK_AGAIN_S", 0.0)
    membership, client = Membership(ME, RUN, ttl_s=60.0), Behind(1000)
    first, second = (PeerRecord(peer=MATE.peer, incarnation=1, version=version, phase=Phase.ACCUMULATING) for version in (1, 2))
    membership.absorb([sign_record(first, MATE, RUN).raw])
    liveness = Liveness(membership, cast(SwarmClient, client), client.heard_s, Lines())
    liveness.report_failure(MATE.peer)
    probes = asyncio.gather(*liveness._probes.values())
    async with asyncio.timeout(60.0):
        while client.asked < 2:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.001)
    membership.absorb([sign_record(second, MATE, RUN).raw])
    await probes
    assert 1 < client.asked < 1000
    assert liveness.faults_seen == 0


@dataclass
class Witnesses:
    """`accused` answers nobody here, and those that reach it say so."""

    accused: PeerId
    reached_by: set[PeerId] = field(default_factory=set)
    gone: set[PeerId] = field(default_factory=set)
    asked: list[PeerId] = field(default_factory=list)

    async def gossip(self, _peer: PeerId, _records: Sequence[RawRecord], _timeout_s: float) -> tuple[RawRecord, ...]:
        raise PeerGoneError("no answer")

    async def reaches(self, witness: PeerId, accused: PeerId, _within_s: float) -> bool:
        assert accused == self.accused
        self.asked.append(witness)
        if witness in self.gone:
            raise PeerGoneError("no answer")
        return witness in self.reached_by


OTHERS = [Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(10, 15)]


async def one_failure(num_others: int, reached_by: int, gone: int = 0, leaving: bool = False) -> tuple[Witnesses, Liveness, PeerRecord]:
    """The mate does not answer; of so many others the first `reached_by` reach it, and the last `gone` do not answer either."""
    row = FixedRow(PeerRecord(peer=ME.peer, incarnation=1, phase=Phase.ACCUMULATING))
    membership = Membership(ME, RUN, ttl_s=60.0, row=row)
    membership.publish()
    for identity in (MATE, *OTHERS[:num_others]):
        record = PeerRecord(peer=identity.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING, leaving=leaving and identity is MATE)
        membership.absorb([sign_record(record, identity, RUN).raw], identity.peer)
    names = [identity.peer for identity in OTHERS[:num_others]]
    client = Witnesses(MATE.peer, set(names[:reached_by]), set(names[num_others - gone :]))
    liveness = Liveness(membership, cast(SwarmClient, client), {}, Lines())
    liveness.report_failure(MATE.peer)
    await asyncio.gather(*liveness._probes.values())
    published = membership.publish()
    assert published is not None
    return client, liveness, published.record


@pytest.mark.parametrize("num_others", [1, 2, 3])
async def test_hole_43_a_peer_that_others_reach_is_named_and_not_suspected(num_others: int) -> None:
    client, liveness, mine = await one_failure(num_others, reached_by=num_others)
    assert len(client.asked) == num_others
    assert (mine.unreached, mine.suspects, liveness.faults_seen) == ((MATE.peer,), (), 0)


@pytest.mark.parametrize(("num_others", "reached_by", "gone"), [(1, 0, 0), (2, 0, 2), (2, 1, 0), (3, 1, 1)])
async def test_a_peer_that_most_of_those_who_are_asked_do_not_reach_is_suspected(num_others: int, reached_by: int, gone: int) -> None:
    _, liveness, mine = await one_failure(num_others, reached_by, gone)
    assert ([each.peer for each in mine.suspects], liveness.faults_seen) == ([MATE.peer], 1)


@pytest.mark.parametrize("is_refused", [False, True])
@pytest.mark.parametrize("step", [0, 1])
async def test_hole_44_a_peer_in_a_round_with_this_one_is_suspected_only_if_it_is_gone(step: int, is_refused: bool) -> None:
    row = FixedRow(PeerRecord(peer=ME.peer, incarnation=1, phase=Phase.AVERAGING))
    membership, lines = Membership(ME, RUN, ttl_s=60.0, row=row), Lines()
    membership.publish()
    record = PeerRecord(peer=MATE.peer, incarnation=1, version=1, step=step, phase=Phase.ACCUMULATING)
    membership.absorb([sign_record(record, MATE, RUN).raw], MATE.peer)
    if is_refused:
        lines.refused_s[MATE.peer] = time.monotonic()
    liveness = Liveness(membership, cast(SwarmClient, Silent()), {}, lines)
    liveness.report_failure(MATE.peer)
    await asyncio.gather(*liveness._probes.values())
    assert liveness.faults_seen == (is_refused or step == 1)


async def test_three_are_asked_at_most_and_nobody_of_a_peer_that_leaves() -> None:
    assert len((await one_failure(5, reached_by=5))[0].asked) == 3
    client, _, mine = await one_failure(3, reached_by=3, leaving=True)
    assert (client.asked, [each.peer for each in mine.suspects]) == ([], [MATE.peer])


async def test_all_that_ask_at_once_whether_a_peer_is_there_get_one_answer() -> None:
    membership, client = Membership(ME, RUN, ttl_s=60.0), Answering()
    membership.absorb([sign_record(PeerRecord(peer=MATE.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING), MATE, RUN).raw])
    liveness = Liveness(membership, cast(SwarmClient, client), {}, Lines())
    assert await asyncio.gather(*(liveness.reaches(MATE.peer) for _ in range(5))) == [True] * 5
    assert client.asked == [MATE.peer]
    assert not await liveness.reaches(LIAR.peer), "nothing is known of it"
    assert (await liveness.reaches(MATE.peer), len(client.asked)) == (True, 2)


async def test_hole_22_a_peer_that_cannot_be_called_but_is_heard_of_is_named_and_not_suspected_again_until_it_falls_silent() -> None:
    row = FixedRow(PeerRecord(peer=ME.peer, incarnation=1, phase=Phase.ACCUMULATING))
    membership = Membership(ME, RUN, ttl_s=1.0, row=row)
    liveness = Liveness(membership, cast(SwarmClient, Silent()), {}, Lines())

    async def fails() -> tuple[PeerId, ...]:
        membership.publish()
        liveness.report_failure(MATE.peer)
        await asyncio.gather(*liveness._probes.values())
        published = membership.publish()
        assert published is not None
        return published.record.unreached

    for version in range(1, 4):  # third parties bring its records
        record = PeerRecord(peer=MATE.peer, incarnation=1, version=version, phase=Phase.ACCUMULATING)
        membership.absorb([sign_record(record, MATE, RUN).raw])
        assert await fails() == (MATE.peer,)
        assert liveness.faults_seen == 1
        assert membership.live().find(MATE.peer) is not None or version == 1
    await asyncio.sleep(0.6)
    assert await fails() == (MATE.peer,)
    assert liveness.faults_seen == 2
    membership.reached(MATE.peer)
    published = membership.publish()
    assert published is not None
    assert published.record.unreached == ()


async def test_hole_22_a_peer_from_which_bytes_come_is_named_after_half_a_life_without_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before that, its answers may only be slow: a round on a busy link is not given up for it."""
    monkeypatch.setattr(liveness_module, "ASK_AGAIN_S", 0.0)
    row = FixedRow(PeerRecord(peer=ME.peer, incarnation=1, phase=Phase.ACCUMULATING))
    membership, client = Membership(ME, RUN, ttl_s=1.0, row=row), Behind(1000)
    liveness, told = Liveness(membership, cast(SwarmClient, client), client.heard_s, Lines()), []
    for version in (1, 2, 3):
        record = PeerRecord(peer=MATE.peer, incarnation=1, version=version, phase=Phase.ACCUMULATING)
        membership.absorb([sign_record(record, MATE, RUN).raw])
        membership.publish()
        liveness.report_failure(MATE.peer)
        await asyncio.sleep(0.3)
        told.append(published.record.unreached if (published := membership.publish()) is not None else ())
    liveness.close()
    assert (told[0], told[-1], liveness.faults_seen) == ((), (MATE.peer,), 0)


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_line_over_which_nothing_comes_back_is_given_up_though_the_peer_is_heard_and_a_slow_one_is_not(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer dials this one from another address, and its records rise; what this peer sends goes to the old address."""
    monkeypatch.setattr(liveness_module, "ASK_AGAIN_S", 0.0)
    membership, client, lines = Membership(ME, RUN, ttl_s=60.0), Behind(1000), Lines()
    if is_slow:
        lines.answered_s = client.heard_s
    liveness = Liveness(membership, cast(SwarmClient, client), client.heard_s, lines)
    for version in range(1, 3):
        record = PeerRecord(peer=MATE.peer, incarnation=1, version=version, phase=Phase.ACCUMULATING)
        membership.absorb([sign_record(record, MATE, RUN).raw])
        liveness.report_failure(MATE.peer)
        probes = asyncio.gather(*liveness._probes.values())
        rises = replace(record, version=version + 10)
        while client.asked < 1:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)
        membership.absorb([sign_record(rises, MATE, RUN).raw])
        await probes
        await asyncio.sleep(0)
    assert lines.given_up == ([] if is_slow else [MATE.peer])
    assert liveness.faults_seen == 0


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_line_is_given_up_where_no_answer_comes_in_time_and_not_where_the_call_ended_by_itself(has_ended: bool) -> None:
    """It ended because the peer gave the connection up: to give up the next one as well would go on for ever at both ends."""
    error = PeerGoneError("Socket closed") if has_ended else UnansweredError("no answer within 1.0 s")
    membership, lines = Membership(ME, RUN, ttl_s=60.0), Lines()
    membership.absorb([sign_record(PeerRecord(peer=MATE.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING), MATE, RUN).raw])
    liveness = Liveness(membership, cast(SwarmClient, Behind(0, error=error)), {}, lines)
    liveness.report_failure(MATE.peer)
    await asyncio.gather(*liveness._probes.values())
    await asyncio.sleep(0)
    assert lines.given_up == ([] if has_ended else [MATE.peer])


@pytest.mark.parametrize("took_s", [0.001, 1.0])
async def test_a_line_is_given_up_only_after_far_longer_than_answers_take_of_late(took_s: float) -> None:
    """Where machines are short of processor time all answers are late, and to dial anew makes them later."""
    membership, lines = Membership(ME, RUN, ttl_s=60.0), Lines()
    lines.answer_times.took(took_s, time.monotonic())
    membership.absorb([sign_record(PeerRecord(peer=MATE.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING), MATE, RUN).raw])
    liveness = Liveness(membership, cast(SwarmClient, Behind(0)), {}, lines)
    liveness.report_failure(MATE.peer)
    await asyncio.gather(*liveness._probes.values())
    await asyncio.sleep(0)
    assert lines.given_up == ([MATE.peer] if took_s < 0.01 / LATE else [])
    assert liveness.faults_seen == 1, "whether it is suspected does not depend on it"


async def test_connections_to_the_old_address_of_a_peer_end_as_soon_as_its_record_names_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness_module, "LOOK_PERIOD_S", 0.0)
    membership, lines = Membership(ME, RUN, ttl_s=60.0), Lines()
    following = asyncio.ensure_future(Liveness(membership, cast(SwarmClient, Silent()), {}, lines).follow_moves())
    circuit = f"/ip4/203.0.113.9/tcp/4001/p2p/{ME.peer}/p2p-circuit/p2p/{MATE.peer}"
    for version, hosts in enumerate([["10.0.0.1"], ["8.8.8.8", "10.0.0.1"], ["10.0.0.1"], [], ["10.0.0.2"]], start=1):
        assert lines.given_up == []
        addresses = tuple(f"/ip4/{host}/tcp/4001/p2p/{MATE.peer}" for host in hosts) or (circuit,)
        record = PeerRecord(peer=MATE.peer, incarnation=1, version=version, phase=Phase.ACCUMULATING, addresses=addresses)
        membership.absorb([sign_record(record, MATE, RUN).raw])
        for _ in range(5):
            await asyncio.sleep(0)
    assert lines.given_up == [MATE.peer]
    following.cancel()


@dataclass
class Answering:
    """Everybody answers."""

    asked: list[PeerId] = field(default_factory=list)

    async def gossip(self, peer: PeerId, _records: Sequence[RawRecord], _timeout_s: float) -> tuple[RawRecord, ...]:
        self.asked.append(peer)
        return ()


async def test_a_peer_whose_row_makes_room_while_it_is_asked_is_no_error() -> None:
    membership, client = Membership(ME, RUN, ttl_s=60.0), Silent()
    membership.absorb([sign_record(PeerRecord(peer=MATE.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING), MATE, RUN).raw])
    liveness = Liveness(membership, cast(SwarmClient, client), {}, Lines())
    liveness.report_failure(MATE.peer)
    membership.view._evict(MATE.peer)
    (found,) = await asyncio.gather(*liveness._probes.values(), return_exceptions=True)
    assert found is None
    assert liveness.faults_seen == 0


async def settled() -> None:
    """Nothing here waits for time to pass."""
    for _turn in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_alive", [True, False])
async def test_hole_31_an_accused_peer_is_asked_and_its_answer_counts_for_more(is_alive: bool) -> None:
    membership, client = Membership(ME, RUN, ttl_s=60.0), Answering() if is_alive else Silent()
    liveness = Liveness(membership, cast(SwarmClient, client), {MATE.peer: time.monotonic()}, Lines())
    following = asyncio.ensure_future(liveness.follow_accusations())
    membership.absorb([sign_record(PeerRecord(peer=MATE.peer, incarnation=1, version=1, phase=Phase.ACCUMULATING), MATE, RUN).raw])
    for version in (1, 2):
        accusation = (Suspicion(MATE.peer, MAX_COUNT, MAX_COUNT),)
        record = PeerRecord(peer=LIAR.peer, incarnation=1, version=version, phase=Phase.ACCUMULATING, suspects=accusation)
        membership.absorb([sign_record(record, LIAR, RUN).raw])
        await settled()
        assert (membership.doubted.qsize(), liveness._probes) == (0, {})
        assert (membership.live().find(MATE.peer) is not None) == is_alive
    assert liveness.faults_seen == (not is_alive)
    if isinstance(client, Answering):
        assert client.asked == [MATE.peer], "it is vouched for"
    following.cancel()


async def test_an_accused_peer_from_which_nothing_came_lately_is_not_asked() -> None:
    """In a large stage most peers never talk to each other: one accusation would make all of them dial the accused."""
    membership, client = Membership(ME, RUN, ttl_s=60.0), Answering()
    liveness = Liveness(membership, cast(SwarmClient, client), {MATE.peer: time.monotonic() - 61.0}, Lines())
    following = asyncio.ensure_future(liveness.follow_accusations())
    membership.doubted.put_nowait(MATE.peer)
    await settled()
    assert membership.doubted.empty()
    assert client.asked == []
    following.cancel()
