"""Who owns which microbatches: each trainer a range, each microbatch one trainer, and one that comes or goes moves its own range alone."""

from __future__ import annotations

import time
from statistics import fmean

from hypothesis import given
from hypothesis import strategies as st

from peerd.policy.route.owning import Ring, first_owners, owned_among_first
from peerd.policy.step.ledger import full, indices
from peerd.table.record import PeerId

trainers = st.lists(st.integers(0, 40).map(lambda n: PeerId(f"t{n}")), min_size=1, max_size=8, unique=True)
MANY = tuple(PeerId(f"t{n}") for n in range(300))


@st.composite
def rings(draw: st.DrawFn) -> Ring:
    """A ring on which trainers stand close together, at one point, or anywhere."""
    points = draw(st.lists(st.one_of(st.integers(0, 8), st.integers(0, (1 << 64) - 1)), min_size=1, max_size=8))
    by_point = sorted((point, PeerId(f"t{number}")) for number, point in enumerate(points))
    names = tuple(name for _, name in by_point)
    return Ring(names, tuple(point for point, _ in by_point), {name: place for place, name in enumerate(names)})


def owners(found: tuple[PeerId, ...], step: int, num_microbatches: int, index: int) -> tuple[PeerId, ...]:
    """The trainers in the order in which they own a microbatch."""

    def rank(peer: PeerId) -> int:
        ranks = range(1, len(found) + 1)
        return next(each for each in ranks if owned_among_first(found, peer, step, num_microbatches, each) >> index & 1)

    return tuple(sorted(found, key=rank))


def num_ranges(bitmap: int, num_microbatches: int) -> int:
    """The number of ranges that the set bits make up, where the first microbatch follows the last one."""
    before = bitmap << 1 | bitmap >> num_microbatches - 1
    return (bitmap & ~before).bit_count() if bitmap != full(num_microbatches) else 1


@given(trainers, st.integers(0, 9), st.integers(1, 99), st.integers(1, 9))
def test_as_many_trainers_own_a_microbatch_as_there_are_ranks(found: list[PeerId], step: int, num_microbatches: int, ranks: int) -> None:
    owned = [owned_among_first(tuple(found), peer, step, num_microbatches, ranks) for peer in found]
    assert all(sum(each >> index & 1 for each in owned) == min(ranks, len(found)) for index in range(num_microbatches))
    assert owned == [owned_among_first(tuple(sorted(found)), peer, step, num_microbatches, ranks) for peer in found]
    assert owned_among_first(tuple(found), PeerId("nobody"), step, num_microbatches, ranks) == 0


@given(rings(), st.integers(1, 99), st.integers(1, 9))
def test_wherever_trainers_stand_as_many_own_a_microbatch_as_there_are_ranks(ring: Ring, num_microbatches: int, ranks: int) -> None:
    owned = [ring.owned(place, ranks, num_microbatches) for place in range(len(ring.trainers))]
    assert all(sum(each >> index & 1 for each in owned) == min(ranks, len(owned)) for index in range(num_microbatches))
    assert all(each <= full(num_microbatches) for each in owned)


@given(rings(), st.integers(1, 99), st.integers(1, 9))
def test_what_a_trainer_owns_is_one_range(ring: Ring, num_microbatches: int, ranks: int) -> None:
    for place in range(len(ring.trainers)):
        assert num_ranges(ring.owned(place, ranks, num_microbatches), num_microbatches) <= 1


@given(rings(), st.integers(1, 99))
def test_the_first_owner_of_a_microbatch_is_the_one_in_whose_range_it_lies(ring: Ring, num_microbatches: int) -> None:
    for index in range(num_microbatches):
        owner = ring.first_owner(index, num_microbatches)
        assert ring.owned(ring.places[owner], 1, num_microbatches) >> index & 1


@given(trainers, st.integers(0, 9), st.integers(0, full(70)), st.integers(1, 70))
def test_first_owners_are_told_once_each(found: list[PeerId], step: int, bitmap: int, num_microbatches: int) -> None:
    told = list(first_owners(tuple(found), step, bitmap, num_microbatches))
    asked = bitmap & full(num_microbatches)
    assert sorted(told) == sorted(peer for peer in found if asked & owned_among_first(tuple(found), peer, step, num_microbatches))
    assert list(first_owners((), step, bitmap, num_microbatches)) == []


@given(trainers, st.integers(0, 9), st.integers(0, 98), st.data())
def test_the_others_keep_their_order_when_a_trainer_goes(found: list[PeerId], step: int, index: int, data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(found))
    rest = tuple(trainer for trainer in found if trainer != gone)
    assert owners(rest, step, 99, index) == tuple(trainer for trainer in owners(tuple(found), step, 99, index) if trainer != gone)


@given(trainers, st.integers(0, 9), st.integers(1, 99), st.data())
def test_a_trainer_that_comes_or_goes_moves_its_own_range_alone_and_two_others_share_it(
    found: list[PeerId], step: int, num_microbatches: int, data: st.DataObject
) -> None:
    """So peers whose views differ by one trainer launch no more than its range twice."""
    gone, all_of_them = data.draw(st.sampled_from(found)), tuple(found)
    rest = tuple(trainer for trainer in found if trainer != gone)

    def gain(peer: PeerId) -> int:
        before, after = (owned_among_first(names, peer, step, num_microbatches) for names in (all_of_them, rest))
        return before ^ after

    was_its, gains = owned_among_first(all_of_them, gone, step, num_microbatches), [gain(peer) for peer in rest]
    assert sum(each > 0 for each in gains) <= 2
    if rest:
        assert sum(gains) == was_its
        assert max(each.bit_count() for each in gains) <= -(-num_microbatches // 2), "half the way around the ring at most"


def test_of_two_trainers_each_owns_half() -> None:
    for step in range(50):
        assert 199 <= owned_among_first(MANY[:2], MANY[0], step, 400).bit_count() <= 201


def test_shares_even_out_over_steps_and_of_many_none_is_large() -> None:
    shares = [[owned_among_first(MANY, peer, step, 4096).bit_count() for peer in MANY] for step in range(20)]
    assert max(max(of_step) for of_step in shares) < 8 * 4096 / len(MANY)
    means = [fmean(of_peer) for of_peer in zip(*shares, strict=True)]
    assert 0.4 < min(means) * len(MANY) / 4096 < max(means) * len(MANY) / 4096 < 1.8


def test_ownership_takes_little_time_however_many_microbatches_a_step_has() -> None:
    """The first look sorts the trainers; a further one only asks where its trainer stands."""
    for step, num_microbatches in enumerate((4096, 1 << 18)):
        began_s = time.thread_time()
        owned_among_first(MANY, MANY[7], step, num_microbatches)
        assert time.thread_time() - began_s < 0.03
        began_s = time.thread_time()
        for ranks in (1, 8, 150):
            owned_among_first(MANY, MANY[7], step, num_microbatches, ranks)
        assert time.thread_time() - began_s < 0.003
        began_s = time.thread_time()
        assert len(list(first_owners(MANY, step, full(4096), num_microbatches))) <= len(MANY)
        assert time.thread_time() - began_s < 0.1


def test_nobody_can_choose_a_name_that_owns_much_in_every_step() -> None:
    largest = [max(MANY, key=lambda peer, step=step: owned_among_first(MANY, peer, step, 4096).bit_count()) for step in range(8)]  # type: ignore[misc]
    assert len(set(largest)) > 4
    assert next(indices(owned_among_first(MANY, MANY[0], 1, 4096))) != next(indices(owned_among_first(MANY, MANY[0], 2, 4096)))
