"""The membership: merges what arrives, publishes what this peer is, and believes nothing that is not signed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from peerd.errors import BadMessageError
from peerd.swarm.clock import clock_s
from peerd.swarm.contradictions import is_proof
from peerd.swarm.identity import Identity
from peerd.swarm.membership import Membership
from peerd.swarm.signed import sign_record
from peerd.swarm.word import Word
from peerd.table.record import MAX_STEP, AverageId, Lineage, PeerRecord, Phase, RawRecord, RunId, StepNorm, Suspicion, TiedSum, Vitals
from tests.swarm.fixed_row import FixedRow

RUN = RunId("a" * 32)
ME, MATE, THIRD = (Identity(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in range(3))


def membership(**own: object) -> Membership:
    record = replace(PeerRecord(peer=ME.peer, incarnation=4, phase=Phase.ACCUMULATING), **own)  # type: ignore[arg-type]
    return Membership(ME, RUN, ttl_s=60, row=FixedRow(record))


def row_of(mine: Membership) -> FixedRow:
    return cast(FixedRow, mine.row)


def raw(identity: Identity = MATE, signer: Identity | None = None, **fields: object) -> RawRecord:
    record = replace(PeerRecord(peer=identity.peer, incarnation=1, version=1), **fields)  # type: ignore[arg-type]
    return sign_record(record, signer or identity, RUN).raw


def test_what_i_publish_has_a_higher_version_each_time_and_my_state_and_vitals() -> None:
    mine = membership(step=7)
    row_of(mine).measured = Vitals(queue=3, addresses=("here",))
    first, second = mine.publish(), mine.publish()
    assert first is not None
    assert second is not None
    assert second.record.pair > first.record.pair
    assert (second.record.step, second.record.queue, second.record.addresses) == (7, 3, ("here",))
    assert mine.live().mine == second.record


def test_before_it_has_a_state_it_publishes_nothing() -> None:
    assert Membership(ME, RUN, ttl_s=60).publish() is None
    assert Membership(ME, RUN, ttl_s=60).current() is None


def test_who_asks_for_my_record_again_gets_the_same_version_until_my_state_changes() -> None:
    mine = membership(step=7)
    first = mine.current()
    assert first is not None
    assert all(mine.current() is first for _ in range(100))
    row_of(mine).mine = replace(first.record, done=0b1)
    second = mine.current()
    assert second is not None
    assert (second.record.version, second.record.done) == (first.record.version + 1, 0b1)
    assert mine.publish() is not second, "each period has a version of its own, by which the record stays alive"


def test_a_newer_record_replaces_an_older_one_and_never_the_other_way_round() -> None:
    mine = membership()
    for version, expected in ((2, 2), (1, 2), (3, 3), (3, 3)):
        mine.absorb([raw(version=version)])
        found = mine.find(MATE.peer)
        assert found is not None
        assert found.version == expected


def test_a_senders_own_forged_record_is_refused_and_counted_and_the_sound_ones_beside_it_stay() -> None:
    mine, other = membership(), Identity(Ed25519PrivateKey.generate())
    with pytest.raises(BadMessageError, match="not signed by it"):
        mine.absorb([raw(), raw(THIRD, signer=MATE), raw(other)], THIRD.peer)
    assert mine.find(MATE.peer) is not None
    assert mine.find(other.peer) is not None
    assert mine.find(THIRD.peer) is None
    assert mine.messages_refused == 1


def test_a_record_of_a_stage_that_the_run_does_not_have_is_refused_and_counted() -> None:
    mine = Membership(ME, RUN, ttl_s=60, num_stages=2)
    mine.absorb([raw(stage=1)])
    with pytest.raises(BadMessageError, match="names stage 2 and step"):
        mine.absorb([raw(stage=2, version=9)], MATE.peer)
    assert mine.messages_refused == 1
    assert [record.stage for record in mine.live().records] == [1]


def test_of_records_that_were_passed_on_a_broken_one_costs_only_itself_and_its_own_sender_alone_is_blamed() -> None:
    mine = membership()
    forged = raw(THIRD, signer=MATE)
    assert mine.absorb([forged, (b"junk", b""), raw()], MATE.peer) == [raw()], "MATE may have been deceived"
    assert mine.find(THIRD.peer) is None
    assert mine.messages_refused == 2
    with pytest.raises(BadMessageError):
        mine.absorb([forged], THIRD.peer)


def test_what_travels_on_is_what_this_peer_has_verified() -> None:
    """An older record is not looked at, so its signature may be anything. It must not reach others, who would blame this peer."""
    mine = membership()
    newest = raw(version=100)
    mine.absorb([newest])
    body, _ = raw(version=50)
    assert mine.absorb([(body, bytes(64))], THIRD.peer) == [], "one word does not prove that a daemon has its key"
    mine.called_by(MATE.peer)
    assert mine.absorb([(body, bytes(64))], THIRD.peer) == [newest]


def test_keys_that_nobody_reached_make_room_and_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.table.swarm_view.MAX_UNPROVEN", 4)
    mine = membership()
    mine.absorb([raw(version=7), raw(THIRD, version=1)])
    mine.called_by(MATE.peer)
    mine.reached(THIRD.peer)
    ghosts = [Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "little"))) for number in range(1000, 1010)]
    mine.absorb([raw(ghost) for ghost in ghosts])
    assert mine.raws.keys() == {MATE.peer, THIRD.peer, *(ghost.peer for ghost in ghosts[-4:])}
    assert len(mine.news.tags(clock_s())) == 2, "strangers are no news"
    mine.absorb([raw(version=6)])
    assert mine.raws[MATE.peer].record.version == 7


@pytest.mark.parametrize("later", [[], [raw(version=5), raw(version=6)]], ids=["at once", "after it said more"])
def test_hole_35_whoever_signs_two_records_under_one_version_counts_for_nothing_and_others_hear_why(later: list[RawRecord]) -> None:
    mine, told = membership(), (raw(version=3, step=1), raw(version=3, step=2))
    mine.absorb([told[0], *later])
    mine.absorb([told[1]])
    assert mine.contradictory == {MATE.peer}
    mine.absorb([raw(version=9), *told])
    assert mine.live().find(MATE.peer) is None
    assert mine.contradictions.untold.get_nowait() == (MATE.peer, told)
    assert mine.contradictions.untold.empty(), "they are told of once"
    newcomer = membership()
    newcomer.absorb(mine.contradictions.told)
    assert newcomer.contradictory == {MATE.peer}


def test_hole_35_a_proof_counts_with_those_who_have_heard_later_records() -> None:
    mine = membership()
    mine.absorb([raw(version=30)])
    mine.absorb([raw(version=3, step=1), raw(version=3, step=2)], THIRD.peer)
    assert mine.contradictory == {MATE.peer}


def test_a_forged_contradiction_is_refused_and_the_same_record_again_is_none() -> None:
    mine = membership()
    mine.absorb([raw(version=3), raw(version=3)])
    with pytest.raises(BadMessageError):
        mine.absorb([raw(version=3, step=9, signer=THIRD)], MATE.peer)
    mine.absorb([raw(version=4)])
    mine.absorb([raw(version=2, step=9, signer=THIRD), raw(version=2)], THIRD.peer)
    assert not mine.contradictory


def test_two_records_are_a_proof_only_if_one_key_signed_both_for_this_run_under_one_pair() -> None:
    first, other = raw(version=3), raw(version=3, step=1)
    assert is_proof(first, other, RUN)
    assert not is_proof(first, first, RUN)
    assert not is_proof(first, raw(version=4, step=1), RUN)
    assert not is_proof(first, raw(incarnation=2, version=3), RUN)
    assert not is_proof(first, raw(THIRD, version=3, step=1), RUN)
    assert not is_proof(first, raw(version=3, step=1, signer=THIRD), RUN)
    assert not is_proof(first, other, RunId("b" * 32))
    assert not is_proof(first, (b"junk", b""), RUN)


async def test_a_forged_contradiction_of_mine_fences_nobody() -> None:
    mine = membership()
    mine.publish()
    waiting = asyncio.ensure_future(mine.word.due())
    for step in (1, 2):
        mine.absorb([raw(ME, incarnation=4, version=1, step=step, signer=THIRD)] * 2)
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()


async def test_another_daemon_that_says_something_else_under_my_version_makes_me_take_a_higher_one() -> None:
    mine = membership()
    published = mine.publish()
    assert published is not None
    mine.absorb([raw(ME, incarnation=4, version=published.record.version, step=77)])
    assert await mine.word.due() == Word(tell=False, superseded_by=4)


def test_a_step_beyond_the_end_of_the_run_is_refused() -> None:
    mine = Membership(ME, RUN, ttl_s=60, last_step=30)
    mine.absorb([raw(step=30)])
    with pytest.raises(BadMessageError, match="ends at step 30"):
        mine.absorb([raw(version=2, step=31)], MATE.peer)
    with pytest.raises(BadMessageError):
        membership().absorb([raw(step=MAX_STEP + 1)], MATE.peer)


async def test_among_records_of_many_a_broken_one_costs_only_itself() -> None:
    mine = membership()
    await mine.absorb_quietly([(b"junk", b""), raw(THIRD, signer=MATE), raw()])
    assert mine.find(MATE.peer) is not None
    assert mine.find(THIRD.peer) is None


async def test_a_forged_record_cannot_hide_the_true_one_that_comes_later() -> None:
    mine = membership()
    await mine.absorb_quietly([raw(version=1000, signer=THIRD)])
    mine.absorb([raw(version=1)])
    assert mine.find(MATE.peer) is not None


async def test_my_own_record_from_elsewhere_never_replaces_mine_but_tells_that_i_was_superseded() -> None:
    mine = membership()
    mine.publish()
    mine.absorb([raw(ME, incarnation=9, step=77), raw(ME, incarnation=8, step=77)])
    assert await mine.word.due() == Word(tell=False, superseded_by=9)
    record = mine.find(ME.peer)
    assert record is not None
    assert record.step == 0


async def test_i_learn_that_i_am_suspected_at_what_i_published_last_and_not_at_what_came_before() -> None:
    mine = membership()
    waiting = asyncio.ensure_future(mine.word.due())
    old, new = mine.publish(), mine.publish()
    assert old is not None
    assert new is not None
    mine.absorb([raw(version=1, suspects=(Suspicion(ME.peer, *old.record.pair),))])
    await asyncio.sleep(0)
    assert not waiting.done()
    mine.absorb([raw(version=2, suspects=(Suspicion(ME.peer, *new.record.pair),))])
    assert await waiting == Word(tell=True, superseded_by=0)


def test_a_suspect_does_not_count_for_anybody_until_its_record_rises() -> None:
    mine = membership()
    mine.absorb([raw(version=1, phase=Phase.ACCUMULATING)])
    record = mine.find(MATE.peer)
    assert record is not None
    mine.suspect(record)
    published = mine.publish()
    assert published is not None
    assert published.record.suspects == (Suspicion(MATE.peer, 1, 1),)
    assert mine.live().find(MATE.peer) is None
    mine.absorb([raw(version=2)])
    mine.publish()
    assert mine.live().find(MATE.peer) is not None


async def woken_by(mine: Membership, *raws: RawRecord, sender: Identity | None = None) -> bool:
    """Whether somebody who waits for a change looks again when these come."""
    waiting = asyncio.ensure_future(mine.changed(10.0))
    await asyncio.sleep(0)
    mine.absorb(raws, sender.peer if sender is not None else None)
    await asyncio.sleep(0)
    woken = any(waiter.done() for waiter in mine._waiters._waiters) or waiting.done()
    waiting.cancel()
    return woken


async def test_a_renewal_that_says_nothing_more_wakes_nobody() -> None:
    mine = membership()
    assert await woken_by(mine, raw(version=1))
    assert not await woken_by(mine, raw(version=2))
    assert await woken_by(mine, raw(version=3, done=1))
    assert not await woken_by(mine, raw(version=4, done=1))
    mine.clear_liveness()
    assert await woken_by(mine, raw(version=5, done=1)), "it did not count"


async def test_a_renewal_of_one_who_is_suspected_wakes_all_for_it_counts_again() -> None:
    mine = membership()
    mine.absorb([raw(version=1), raw(THIRD, suspects=(Suspicion(MATE.peer, 1, 1),))])
    assert mine.live().find(MATE.peer) is None
    assert await woken_by(mine, raw(version=2))
    assert mine.live().find(MATE.peer) is not None


@pytest.mark.parametrize(("incarnation", "mistakes"), [(1, 1), (2, 0)])
def test_one_that_i_suspected_and_that_lives_was_my_mistake_but_not_one_that_came_back(incarnation: int, mistakes: int) -> None:
    mine = membership()
    mine.absorb([raw(version=1)])
    record = mine.find(MATE.peer)
    assert record is not None
    mine.suspect(record)
    mine.absorb([raw(incarnation=incarnation, version=2)])
    mine.absorb([raw(incarnation=incarnation, version=3)])
    assert (mine.patience.factor(clock_s()) > 1) == bool(mistakes)


async def test_whoever_waits_for_a_change_is_woken_when_a_record_dies() -> None:
    mine = Membership(ME, RUN, ttl_s=0.05)
    mine.absorb([raw(phase=Phase.ACCUMULATING)])
    assert await mine.changed(30.0)
    assert mine.live().find(MATE.peer) is None
    assert not await mine.changed(0.01)


def test_after_a_fence_nobody_counts_until_seen_anew() -> None:
    mine = membership()
    mine.publish()
    mine.absorb([raw(version=1)])
    mine.clear_liveness()
    assert [record.peer for record in mine.live().records] == [ME.peer]
    mine.absorb([raw(version=1)])
    assert mine.live().find(MATE.peer) is None
    mine.absorb([raw(version=2)])
    assert mine.live().find(MATE.peer) is not None


def test_what_counts_is_asked_anew_when_a_record_comes_when_mine_changes_and_when_one_expires() -> None:
    mine = membership()
    mine.publish()
    assert mine.live() is mine.live()
    mine.absorb([raw(version=1)])
    first = mine.live()
    assert first.find(MATE.peer) is not None
    changed = replace(PeerRecord(peer=ME.peer), step=9)
    row_of(mine).mine = changed
    assert mine.live().mine is not None
    assert mine.live().mine.step == 9  # type: ignore[union-attr]
    mine.view.clear()
    assert mine.live().find(MATE.peer) is None


def test_in_a_large_swarm_i_announce_myself_less_often_and_say_so() -> None:
    mine = membership()
    published = mine.publish()
    assert published is not None
    assert (published.record.periods, published.record.summary) == (1, None)
    others = (Identity(Ed25519PrivateKey.from_private_bytes(number.to_bytes(32, "little"))) for number in range(1000, 1130))
    mine.absorb([raw(other, phase=Phase.JOINING) for other in others])
    published = mine.publish()
    assert published is not None
    assert published.record.periods == 6
    assert published.record.summary is not None
    assert published.record.summary.peers == 1


def test_of_my_own_row_the_steps_fields_count_as_they_are_and_not_as_last_announced() -> None:
    mine = membership()
    mine.publish()
    step = {"step": 3, "phase": Phase.ACCUMULATING, "lineage": Lineage(1, b"c")}
    ledgers = {"done": 1, "ledger_no": 4, "next_done": 2, "next_ledger_no": 5}
    tied = {"tied_sum": AverageId(b"s"), "tied_sums": (TiedSum(2, AverageId(b"t")),), "tied": Lineage(0, b"d")}
    norms = {"average_id": AverageId(b"a"), "gradient_norm": 1.5, "norms": (StepNorm(2, 0.5),)}
    changed = PeerRecord(peer=ME.peer, **step, **ledgers, **tied, **norms)  # type: ignore[arg-type]
    row_of(mine).mine = changed
    assert mine.live().mine == replace(changed, **{name: getattr(mine.live().mine, name) for name in ("version", *Vitals.__slots__)})


async def test_whoever_waits_wakes_at_a_change_and_not_at_a_repeat() -> None:
    mine = membership()
    waiting = asyncio.ensure_future(mine.changed(10))
    await asyncio.sleep(0)
    mine.absorb([raw()])
    assert await waiting is True
    again = asyncio.ensure_future(mine.changed(0.05))
    await asyncio.sleep(0)
    mine.absorb([raw()])
    assert await again is False
