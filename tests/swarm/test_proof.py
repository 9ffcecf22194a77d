"""T8 (proof) in the membership: a peer counts once it has called or answered, or two others have told of it."""

from __future__ import annotations

import asyncio

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.swarm.clock import clock_s
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.table.record import Suspicion
from tests.swarm.test_membership import MATE, THIRD, membership, raw, woken_by

GHOST = Identity(Ed25519PrivateKey.from_private_bytes(bytes([9]) * 32))


def settled(*others: Identity) -> Membership:
    """A peer that has known these for so long that it is no newcomer any more."""
    mine = membership()
    mine.absorb([raw(other) for other in others])
    for other in others:
        mine.view.prove(other.peer, clock_s() - mine.view.ttl_s)
    return mine


async def test_hole_37_a_key_of_which_one_peer_tells_counts_for_nothing_and_wakes_nobody_until_another_one_tells_of_it() -> None:
    mine = settled(MATE, THIRD)
    for version in range(1, 4):
        assert not await woken_by(mine, raw(GHOST, version=version), sender=MATE)
        assert mine.live().find(GHOST.peer) is None
    assert [record.peer for record in mine.strangers()] == [GHOST.peer]
    news = mine.news.tags(clock_s())
    assert mine.absorb([raw(GHOST, version=3)], MATE.peer) == []
    assert await woken_by(mine, raw(GHOST, version=2), sender=THIRD), "an older record shows as well that it knows that peer"
    assert mine.live().find(GHOST.peer) is not None
    assert mine.strangers() == []
    assert len(mine.news.tags(clock_s())) == len(news) + 1
    assert mine.absorb([raw(GHOST, version=3)], MATE.peer) == [raw(GHOST, version=3)]


@pytest.mark.parametrize(("accuser", "is_answered"), [(MATE, True), (GHOST, False)])
async def test_accusations_by_strangers_are_not_answered(accuser: Identity, is_answered: bool) -> None:
    mine = settled(MATE, THIRD)
    waiting = asyncio.ensure_future(mine.word.due())
    mine.absorb([raw(accuser, version=2, suspects=(Suspicion(mine.me, 4, 9),))], THIRD.peer)
    await asyncio.sleep(0)
    assert waiting.done() == is_answered
    waiting.cancel()


@pytest.mark.parametrize("calls", [True, False])
async def test_hole_37_a_peer_that_calls_or_answers_counts_from_then_on(calls: bool) -> None:
    mine, newcomer = settled(MATE, THIRD), GHOST
    mine.absorb([raw(newcomer)], MATE.peer)
    (mine.called_by if calls else mine.reached)(newcomer.peer)
    assert mine.live().find(newcomer.peer) is not None
    assert len(mine.news.tags(clock_s())) == 1


async def test_a_newcomers_first_table_counts_wherever_the_record_of_the_peer_that_gives_it_stands_in_it() -> None:
    mine = membership()
    others = [Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "little"))) for number in range(1000, 1040)]
    await mine.absorb_quietly([raw(other, periods=8) for other in (*others, MATE)], MATE.peer)
    for later_s in (0.0, 1.1 * mine.view.ttl_s):
        assert len(mine.view.live(clock_s() + later_s).records) == 41


def test_hole_37_beyond_a_rate_records_of_strangers_are_not_even_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.policy.swarm.meeting.READ_AT_FIRST", 3)
    mine = settled(MATE, THIRD)
    ghosts = [Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "little"))) for number in range(1000, 1010)]
    mine.absorb([raw(ghost, signer=MATE) for ghost in ghosts], MATE.peer)
    assert mine.messages_refused == 3
    mine.absorb([raw(ghosts[0]), raw(THIRD, version=2)], MATE.peer)
    mine.absorb([raw(ghosts[1])], THIRD.peer)
    assert mine.find(ghosts[0].peer) is None, "MATE has told enough"
    assert mine.find(THIRD.peer).version == 2  # type: ignore[union-attr]
    assert mine.find(ghosts[1].peer) is not None
