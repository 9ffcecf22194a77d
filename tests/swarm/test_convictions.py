"""Two slices of one round that a reducer has signed: who counts for nothing because of that, and who does not."""

from __future__ import annotations

import pytest

from peerd.policy.step.certificates import SignedSlice
from peerd.swarm.identity import Identity
from peerd.table.record import AverageId, RawRecord, RunId
from tests.swarm.test_membership import MATE, ME, RUN, THIRD, membership, raw

ROUND, OTHER_ROUND = AverageId(b"r" * 16), AverageId(b"o" * 16)


def slice_of(
    root: bytes, round_id: AverageId = ROUND, *, of: Identity = MATE, signer: Identity | None = None, run: RunId = RUN
) -> RawRecord:
    """What a reducer says of its slice of a round."""
    text = SignedSlice(of.peer, root * 32, b"").statement(run, round_id)
    return text, (signer or of).sign(text)


def test_whoever_signs_two_slices_of_one_round_counts_for_nothing_and_others_hear_why() -> None:
    mine, proof = membership(), (slice_of(b"1"), slice_of(b"2"))
    mine.absorb([raw(version=3)])
    mine.called_by(MATE.peer)
    assert mine.convict(*proof)
    assert mine.contradictory == {MATE.peer}
    assert [*mine.contradictions.refuted] == [ROUND]
    assert mine.live().find(MATE.peer) is None
    assert mine.contradictions.untold.get_nowait() == (MATE.peer, proof)
    assert not mine.convict(*proof), "it is nothing new"
    newcomer = membership()
    newcomer.absorb([raw(version=3), *mine.contradictions.told, raw(THIRD)], THIRD.peer)
    assert newcomer.contradictory == {MATE.peer}
    assert [*newcomer.contradictions.refuted] == [ROUND]
    assert newcomer.messages_refused == 0


@pytest.mark.parametrize(
    "other",
    [
        slice_of(b"1"),
        slice_of(b"2", OTHER_ROUND),
        slice_of(b"2", of=THIRD),
        slice_of(b"2", signer=THIRD),
        slice_of(b"2", run=RunId("b" * 32)),
        raw(version=3),
        (slice_of(b"2")[0][:30], b""),
    ],
    ids=["the same", "another round", "another reducer", "forged", "another run", "a record", "cut short"],
)
def test_two_slices_are_a_proof_only_if_one_reducer_signed_both_for_one_round_of_this_run(other: RawRecord) -> None:
    for pair in ([slice_of(b"1"), other], [other, slice_of(b"1")]):
        mine = membership()
        mine.absorb(pair, THIRD.peer)
        assert not mine.contradictory
        assert not mine.contradictions.refuted


def test_nobody_condemns_itself_for_what_others_say_that_it_signed() -> None:
    mine = membership()
    assert not mine.convict(slice_of(b"1", of=ME), slice_of(b"2", of=ME))
    assert not mine.contradictory
