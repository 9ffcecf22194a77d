"""What a leader proposes: exact codecs while averaging costs little of a step, less as it costs more, and slices as the links are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.averaging.compression import Compression
from peerd.averaging.proposing import AVERAGING_SHARE, Proposing
from peerd.config.codec import parse_averaged, parse_codec
from peerd.policy.round.chunks import LEEWAY, MOST_CHUNK_BYTES, ROWS
from peerd.policy.round.leads import SentRate
from peerd.policy.round.proposing import SLOWDOWN
from peerd.policy.round.slices import NEAR_SLICE_BYTES
from peerd.policy.step.roster import MOST_CHUNKS, MOST_EXPECTED_S, WHOLE, Roster, RosterEntry, why_never
from peerd.table.record import PeerId
from tests.strategies import member

LENGTH = 1_000_000
AVERAGING_S = 10.0
Rate = tuple[float | None, float | None]
NAMES = [PeerId(f"p{number}") for number in range(8)]
rates_told = st.tuples(st.none() | st.floats(0.0, 1e12), st.none() | st.floats(0.0, 1e12))


def roster_of(num_members: int) -> Roster:
    entries = tuple(RosterEntry(peer, 0, 0, 1 << number) for number, peer in enumerate(NAMES[:num_members]))
    return Roster(0, 0, 0, NAMES[0], entries)


def planned(told: Sequence[Rate], allowed: str = "none", step_s: float = 1e9, length: int = LENGTH) -> Roster:
    """What is proposed for members that say this of their links, up and down, after a step that took so long."""
    rates: Mapping[PeerId, Rate] = dict(zip(NAMES, told, strict=False))
    codecs = parse_averaged(allowed)
    proposing = Proposing(codecs, AVERAGING_S, rates.__getitem__, 0.0)
    return proposing.planned(roster_of(len(told)), Compression(codecs, torch.float32), length, step_s)


@pytest.mark.parametrize("allowed", ["none", "int8", "topk:0.1", "powersgd:2"])
def test_what_the_manifest_says_no_leader_changes(allowed: str) -> None:
    assert planned([(1e3, 1e3)] * 3, allowed, step_s=0.1).codecs == ()


@pytest.mark.parametrize(("step_s", "codec"), [(1000.0, "none"), (80.0, "none"), (60.0, "bfloat16"), (30.0, "int8"), (1.0, "topk:0.05")])
def test_a_step_that_computes_for_a_shorter_time_is_compressed_more(step_s: float, codec: str) -> None:
    """An exact accumulator takes 4 MB, and a pair exchanges it once each way."""
    assert planned([(0.5e6, 0.5e6)] * 2, "auto", step_s).codecs == (codec, codec)


def test_who_has_the_slow_line_takes_the_codec_with_fewer_bytes() -> None:
    names = planned([(10e6, 10e6), (10e6, 10e6), (0.2e6, 10e6)], "auto", step_s=60.0).codecs
    assert names[:2] == ("none", "none")
    assert parse_codec(names[2]).num_bytes(LENGTH) < parse_codec("none").num_bytes(LENGTH)


@given(st.lists(st.floats(1e3, 1e9), min_size=2, max_size=8), st.floats(0.01, 1e4))
def test_with_what_is_proposed_averaging_takes_its_share_or_some_line_allows_no_less(rates: list[float], step_s: float) -> None:
    plan = planned([(rate, rate) for rate in rates], "auto", step_s)
    assert plan.expected_s <= 1.2 * AVERAGING_SHARE * step_s + 0.01 * AVERAGING_S or "topk:0.05" in plan.codecs


@given(st.lists(rates_told, min_size=1, max_size=8), st.sampled_from(["none", "auto", "powersgd:2"]), st.integers(1, 10**7))
def test_whatever_links_are_said_to_be_the_roster_is_one_that_members_join(told: list[Rate], allowed: str, length: int) -> None:
    plan = planned(told, allowed, length=length)
    mine = member(NAMES[0], done=1)
    assert why_never(mine, plan, len(told)) is None
    assert 1 <= plan.num_chunks <= MOST_CHUNKS
    assert 0.0 <= plan.expected_s <= MOST_EXPECTED_S
    assert sum(plan.shares) == (WHOLE if plan.shares else 0)
    assert len(plan.codecs) == (len(told) if allowed == "auto" and len(told) > 1 else 0)


def test_a_slow_line_reduces_less_and_one_that_is_hardly_slower_as_much() -> None:
    slow = planned([(10e6, 10e6), (10e6, 10e6), (10e6, 10e6), (0.1e6, 0.1e6)])
    assert slow.shares[3] < min(slow.shares[:3])
    assert planned([(10e6, 10e6), (10e6, 10e6), (9.9e6, 9.9e6)]).shares == ()
    assert planned([(10e6, 10e6), (0.1e6, 0.1e6)]).shares == (), "of two each reduces a half, whatever the rates are"


def test_slower_lines_get_finer_chunks_and_none_is_larger_than_half_a_mebibyte() -> None:
    fast, slow = planned([(1e9, 1e9)] * 2, length=10**8), planned([(1e6, 1e6)] * 2, length=10**8)
    assert 4 * 10**8 / 2 / fast.num_chunks <= MOST_CHUNK_BYTES
    assert slow.num_chunks >= ROWS * LEEWAY * slow.expected_s / AVERAGING_S > fast.num_chunks


def test_no_chunks_are_cut_for_a_line_that_no_round_waits_for() -> None:
    """Who says that its line is dead would else make a round of 1,953 chunks of a kilobyte for all."""
    dead = planned([(1.0, 1.0), (10e6, 10e6), (10e6, 10e6)])
    assert dead.expected_s == MOST_EXPECTED_S
    assert dead.num_chunks <= 2 * ROWS * LEEWAY * SLOWDOWN
    slow = planned([(50e3, 50e3), (2.5e6, 2.5e6), (2.5e6, 2.5e6)])
    assert slow.num_chunks >= ROWS * LEEWAY * min(slow.expected_s, SLOWDOWN) / AVERAGING_S


@pytest.mark.parametrize("is_far", [False, True])
def test_where_all_members_are_on_one_machine_slices_are_equal_and_whole(is_far: bool) -> None:
    """They wait for processors. A round that is slow for want of them would have more chunks the next time, and take longer still."""
    codecs, compression = parse_averaged("none"), Compression(parse_averaged("none"), torch.float32)
    near = set(NAMES[is_far:])
    proposing = Proposing(codecs, AVERAGING_S, lambda _peer: (None, None), 0.0, is_near=near.__contains__)
    proposing.exchanged({peer: SentRate(4e5 * number + 1e5) for number, peer in enumerate(NAMES)}, took_s=4.0, expected_s=4.0)
    plan = proposing.planned(roster_of(8), compression, LENGTH, 1.0)
    if is_far:
        assert plan.num_chunks > 20
        assert len(set(plan.shares)) > 2
    else:
        assert (plan.num_chunks, plan.shares) == (1, (WHOLE // 8,) * 8)


def test_where_all_members_are_on_one_machine_no_slice_is_too_small_to_be_worth_its_messages() -> None:
    """Each member still sends one part and gets one sum. Which members reduce changes with the step."""
    codecs, compression = parse_averaged("none"), Compression(parse_averaged("none"), torch.float32)
    proposing = Proposing(codecs, AVERAGING_S, lambda _peer: (None, None), 0.0, is_near=lambda _peer: True)
    roster = roster_of(8)
    for step in range(8):
        few = proposing.planned(replace(roster, step=step), compression, NEAR_SLICE_BYTES // 4, 1.0)
        assert few.shares == tuple(WHOLE if place == step else 0 for place in range(8))
        assert few.num_chunks == 1


def test_nothing_is_planned_for_a_member_that_is_alone() -> None:
    assert planned([(1e6, 1e6)]) == roster_of(1)


def test_a_line_that_got_much_slower_is_believed_at_once_and_one_that_got_faster_by_and_by() -> None:
    proposing = Proposing(parse_averaged("none"), AVERAGING_S, lambda _peer: (1e9, 1e9), 0.0)

    def expected_s() -> float:
        compression = Compression(parse_averaged("none"), torch.float32)
        return proposing.planned(roster_of(2), compression, LENGTH, 1.0).expected_s

    seconds = []
    for rate in (1e8, 1e6, 1e8):
        proposing.exchanged({NAMES[0]: SentRate(rate), NAMES[1]: SentRate(1e9)}, 1.0, 1.0)
        seconds.append(expected_s())
    assert seconds == pytest.approx([4e6 / 1e8, 4e6 / 1e6, 4e6 / 5.05e7])


def test_a_line_that_was_believed_to_be_far_too_slow_is_so_for_one_round_and_not_for_ever() -> None:
    """Rounds that are short show no rates, so they would never say that it is faster."""
    proposing = Proposing(parse_averaged("none"), AVERAGING_S, lambda _peer: (1e9, 1e9), 0.0)
    compression = Compression(parse_averaged("none"), torch.float32)
    proposing.exchanged({NAMES[0]: SentRate(10.0)}, 1.0, 1.0)
    slow = proposing.planned(roster_of(2), compression, LENGTH, 1.0)
    assert slow.expected_s > 1e5
    proposing.exchanged({}, 1.4, slow.expected_s)
    assert proposing.planned(roster_of(2), compression, LENGTH, 1.0).expected_s < 0.01


def test_a_round_that_took_much_longer_than_expected_ends_what_was_known_of_lines_at_members_that_judged_nothing_too() -> None:
    proposing = Proposing(parse_averaged("none"), AVERAGING_S, lambda _peer: (1e6, 1e6), 0.0)
    compression = Compression(parse_averaged("none"), torch.float32)
    proposing.exchanged({name: SentRate(1e9) for name in NAMES}, 1.0, 1.0)
    assert proposing.planned(roster_of(2), compression, LENGTH, 1.0).expected_s < 0.01
    proposing.exchanged({}, 40.0, 1.0)
    assert proposing.planned(roster_of(2), compression, LENGTH, 1.0).expected_s == pytest.approx(4.0)
