"""Open batches of local steps: where a gradient goes, when a batch is sealed, and what goes where two have computed the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.step import acts
from peerd.policy.step.acts import Act
from peerd.policy.step.asides import merged, sums, sums_to_drop
from peerd.policy.step.batches import MOST_OPEN, batch_for, batch_to_seal, open_dropped
from peerd.policy.step.clocks import StepClocks
from peerd.policy.step.ledger import marked
from peerd.policy.step.situation import OwnState, Situation
from peerd.policy.step.stepping import decide
from peerd.table.record import PeerId, PeerRecord, Phase
from tests.policy.test_stepping import RULES
from tests.strategies import NUM_MICROBATCHES, member, view_of

LOCAL = replace(RULES, local_batch=2, num_microbatches=NUM_MICROBATCHES)
acts_of_a_peer = st.lists(st.integers(0, NUM_MICROBATCHES - 1) | st.just("seal"), max_size=10)


def with_added(record: PeerRecord, indices: list[int], local_batch: int = 2) -> PeerRecord:
    for index in indices:
        record = marked(record, record.step, index, batch_for(record, local_batch))
    return record


def lived(peer: str, did: list[int | str]) -> PeerRecord:
    """A peer that added microbatches, and sealed its oldest batch now and then."""
    record = member(peer)
    for each in did:
        if each == "seal":
            record = merged(record, record.step, record.asides[0].other) if record.asides else record
        elif isinstance(each, int) and not record.done >> each & 1:
            record = with_added(record, [each])
    return record


def decided(mine: PeerRecord, *mates: PeerRecord, told_s: float = 1000.0) -> Act:
    """What a peer does whose open batches have been as they are for so long."""
    own = OwnState(record=mine, open_since_s=tuple((aside.other, 1000.0 - told_s) for aside in mine.asides))
    return decide(Situation(own, view_of(mine, *mates), 1000.0, LOCAL))


def test_gradients_fill_one_batch_after_another_and_the_last_one_takes_the_rest() -> None:
    record = with_added(member("me"), list(range(8)))
    assert [aside.done.bit_count() for aside in record.asides] == [2, 6]
    assert len({aside.other for aside in record.asides}) == MOST_OPEN
    assert record.done == 0xFF
    sealed = merged(record, record.step, record.asides[0].other)
    assert sums(sealed)[PeerId("me")] == 0b11
    assert [aside.done.bit_count() for aside in with_added(sealed, [8]).asides] == [6, 1]


def test_a_full_batch_is_sealed_once_it_has_been_told_for_two_announce_periods() -> None:
    mine = with_added(member("me"), [0, 1, 2])
    assert isinstance(decided(mine, member("mate"), told_s=0.6 * LOCAL.ttl_s), acts.Wait)
    act = decided(mine, member("mate"), told_s=0.7 * LOCAL.ttl_s)
    assert isinstance(act, acts.SealBatch)
    assert act.name == mine.asides[0].other


def test_a_batch_that_is_not_full_or_that_a_mate_has_computed_too_is_not_sealed() -> None:
    assert isinstance(decided(with_added(member("me"), [0]), member("mate")), acts.Wait)
    mine, mate = with_added(member("me"), [0, 1]), with_added(member("mate"), [1])
    assert (
        batch_to_seal(Situation(OwnState(record=mine, open_since_s=((mine.asides[0].other, 0.0),)), view_of(mine, mate), 1e3, LOCAL))
        is None
    )
    mates_act = decided(mate, mine)
    assert isinstance(mates_act, acts.DropSums), "the smaller batch goes"
    assert isinstance(decided(mine, open_dropped(mate)), acts.SealBatch)


def test_nothing_is_sealed_while_microbatches_on_their_way_need_all_versions_that_are_kept() -> None:
    mine = with_added(member("me"), [0, 1])
    own = OwnState(record=mine, open_since_s=((mine.asides[0].other, 0.0),))
    waits, seals = (decide(Situation(each, view_of(mine), 1e3, LOCAL)) for each in (replace(own, keeps_versions=True), own))
    assert isinstance(waits, acts.Wait)
    assert isinstance(seals, acts.SealBatch)


@pytest.mark.parametrize("phase", [Phase.AVERAGING, Phase.AVERAGED, Phase.JOINING])
def test_nothing_is_sealed_while_the_ledger_is_frozen(phase: Phase) -> None:
    assert not isinstance(decided(replace(with_added(member("me"), [0, 1]), phase=phase), member("mate")), acts.SealBatch)


def test_an_open_batch_gives_way_to_a_sealed_sum_however_small_that_is() -> None:
    sealed = lived("mate", [0, "seal"])
    mine = with_added(member("me"), [0, 1])
    assert sums_to_drop(mine, sealed, seals=True) == [mine.asides[0].other]
    assert sums_to_drop(sealed, mine, seals=True) == []
    assert sums_to_drop(mine, sealed) == [], "elsewhere the smaller one goes"


@given(acts_of_a_peer, acts_of_a_peer)
def test_of_two_sums_that_meet_exactly_one_goes_and_of_two_kinds_the_open_one(one: list[int | str], other: list[int | str]) -> None:
    mine, mate = lived("p1", one), lived("p2", other)
    drops, theirs = sums_to_drop(mine, mate, seals=True), sums_to_drop(mate, mine, seals=True)
    for name, bits in sums(mine).items():
        for mates_name, held in sums(mate).items():
            if bits & held:
                assert name in drops or mates_name in theirs
                if (name == "p1") != (mates_name == "p2"):
                    assert (name in drops) if mates_name == "p2" else (mates_name in theirs)


@given(acts_of_a_peer)
def test_a_fence_drops_the_open_batches_and_keeps_what_is_sealed(did: list[int | str]) -> None:
    record = lived("me", did)
    left = open_dropped(record)
    assert left.asides == ()
    assert left.done == sums(record).get(PeerId("me"), 0)
    assert left.ledger_no == record.ledger_no


def test_the_time_of_a_batch_begins_anew_when_it_grows() -> None:
    clocks, mate = StepClocks(), member("mate")

    def runs() -> bool:
        return clocks.run

    def noted(record: PeerRecord, now_s: float) -> dict[PeerId, float]:
        return dict(clocks.noted(OwnState(record=record), view_of(record, mate), LOCAL, now_s).open_since_s)

    first = with_added(member("me"), [0])
    (name,) = noted(first, 1.0)
    assert noted(first, 2.0) == {name: 1.0}
    assert not runs(), "it is not full"
    assert noted(with_added(first, [1]), 3.0) == {name: 3.0}
    assert runs(), "time alone may seal it"
    assert noted(with_added(first, [1, 2]), 4.0)[name] == 3.0
    clocks.restart()
    assert noted(with_added(first, [1]), 5.0) == {name: 5.0}
