"""A peer's own line, measured while tensors pass, and what it believes of the lines of others."""

from __future__ import annotations

import math

import pytest

from peerd.link.line import MOST_BEYOND, LineRates, OwnLine
from peerd.link.traffic import Traffic, Way
from peerd.policy.owner.governor import Limits
from peerd.table.record import PeerId, PeerRecord

MBIT = 125_000
A, B, LIAR = PeerId("a"), PeerId("b"), PeerId("liar")


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def exchange(line: OwnLine, clock: Clock, peers: tuple[PeerId, ...], up: float, down: float, seconds: int) -> None:
    """A chunk from and to each peer each second, side by side, each with an equal share of this peer's line."""
    for _ in range(seconds):
        clock.now_s += 1
        for peer in peers:
            line.received_from(peer, round(down / len(peers)), 1.0, line_share=1 / len(peers))
            line.delivered_to(peer, round(up / len(peers)), 1.0, line_share=1 / len(peers))


def test_the_record_says_what_passed_in_each_direction() -> None:
    clock = Clock()
    line = OwnLine(clock)
    assert line.claims(Limits()) == (0, 0)
    exchange(line, clock, (A, B), 20 * MBIT, 100 * MBIT, 10)
    assert line.measured == pytest.approx((20 * MBIT, 100 * MBIT))
    up, down = line.claims(Limits())
    assert 19 * MBIT < up <= 20 * MBIT
    assert 95 * MBIT < down <= 100 * MBIT
    up, down = line.claims(Limits(upload=5 * MBIT, download=30 * MBIT))
    assert up <= 5 * MBIT
    assert down <= 30 * MBIT


def test_a_claim_counts_as_far_as_the_claimants_chunks_came() -> None:
    clock = Clock()
    line = OwnLine(clock)
    exchange(line, clock, (A,), 20 * MBIT, 100 * MBIT, 10)
    exchange(line, clock, (LIAR,), 20 * MBIT, 5 * MBIT, 10)
    believed = [line.rates_of(PeerRecord(peer=peer, up=90 * MBIT, down=90 * MBIT)).up for peer in (A, LIAR, B)]
    assert believed == pytest.approx([90 * MBIT, 5 * MBIT, 90 * MBIT])
    assert line.rates_of(PeerRecord(peer=B)) == LineRates(None, None)
    assert line.rates_of(PeerRecord(peer=LIAR)).up == pytest.approx(5 * MBIT)


def test_a_transfer_of_unknown_share_bounds_nobodys_claim() -> None:
    line = OwnLine()
    line.received_from(A, 8 * MBIT, 8.0)
    assert line.rates_of(PeerRecord(peer=A, up=90 * MBIT)).up == 90 * MBIT
    assert line.measured.down == pytest.approx(MBIT)


def test_of_what_others_tell_the_second_highest_counts_and_the_highest_up_to_some_times_what_else_is_known() -> None:
    clock = Clock()
    line = OwnLine(clock)
    line.told(A, 20 * MBIT, 8 << 20)
    assert line.measured.up == 20 * MBIT
    line.told(LIAR, 1e12, 1 << 60)
    assert line.measured.up == MOST_BEYOND * 20 * MBIT
    line.told(B, 18 * MBIT, 8 << 20)
    assert line.measured.up == MOST_BEYOND * 20 * MBIT
    line.forget(LIAR)
    exchange(line, clock, (A, B), 25 * MBIT, 100 * MBIT, 10)
    assert line.measured.up == pytest.approx(25 * MBIT)


def test_a_teller_that_got_a_few_tensors_alone_does_not_make_the_line_look_slow() -> None:
    line = OwnLine()
    line.told(A, 1.3 * MBIT, 1 << 20)
    line.told(B, 3.4 * MBIT, 8 << 20)
    assert line.measured.up == 3.4 * MBIT


def test_a_mate_with_a_slow_line_does_not_make_the_own_one_look_slow() -> None:
    """Averages go to that mate alone, but activations to two peers beyond, who tell how fast those come."""
    clock, slow = Clock(), PeerId("slow")
    line = OwnLine(clock)
    for peer in (A, B):
        line.told(peer, 30 * MBIT, 8 << 20)
    exchange(line, clock, (slow,), 2 * MBIT, 2 * MBIT, 10)
    assert line.measured.up == pytest.approx(30 * MBIT)


def test_one_teller_alone_raises_what_was_acknowledged_by_some_times_at_most() -> None:
    clock = Clock()
    line = OwnLine(clock)
    exchange(line, clock, (A,), 2 * MBIT, 2 * MBIT, 10)
    line.told(LIAR, 1000 * MBIT, 8 << 20)
    assert line.measured.up == pytest.approx(MOST_BEYOND * 2 * MBIT)


def test_a_line_that_became_slower_shows_in_what_others_tell() -> None:
    line = OwnLine(Clock())
    for rate in (30 * MBIT, 3 * MBIT):
        for _ in range(12):
            for peer in (A, B):
                line.told(peer, rate, rate)
    assert line.measured.up == pytest.approx(3 * MBIT)


def test_a_probe_shows_what_a_member_that_waits_for_others_does_not() -> None:
    clock = Clock()
    line = OwnLine(clock)
    line.probes.saw(20 * MBIT, 0.5, clock.now_s)
    assert line.measured == LineRates(20 * MBIT, None)
    assert line.is_sound
    line.told(A, 1 * MBIT, 8 << 20)
    exchange(line, clock, (A,), 3 * MBIT, 3 * MBIT, 10)
    assert line.measured.up == 20 * MBIT


def test_a_line_that_became_slower_shows_in_the_next_probes() -> None:
    clock = Clock()
    line = OwnLine(clock)
    line.probes.saw(100 * MBIT, 0.5, clock.now_s)
    exchange(line, clock, (A,), 5 * MBIT, 5 * MBIT, 20)
    assert line.shown is not None
    line.probes.show(line.shown)
    assert line.probes.is_due(clock.now_s, is_idle=True)
    line.probes.saw(5 * MBIT, 0.5, clock.now_s)
    assert line.measured.up == pytest.approx(5 * MBIT)


def test_tensors_of_microbatches_are_counted_and_a_peer_that_is_gone_is_forgotten() -> None:
    traffic, link = Traffic(), (A, Way.TUNNEL)
    for rate in (math.nan, math.inf, -1.0, 0.0):
        traffic.told(link, rate, 1 << 20)
    assert traffic.line.measured == LineRates(None, None)
    traffic.told(link, 1e6, 1 << 20)
    with traffic.receiving(link, 100 << 20):
        pass
    up, down = traffic.line.measured
    assert up == 1e6
    assert down is not None
    traffic.line.received_from(A, 1 << 20, 1.0, 1.0)
    traffic.forget(A)
    assert traffic.line.seen_of(A) == LineRates(None, None)
    assert traffic.line.measured.up == 1e6
