"""A byte stream over several strands arrives whole and in order, however late each is, and although some break."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peerd.errors import BadMessageError
from peerd.link.strands import BLOCK_BYTES, EACH, LATE, WINDOW, Incoming, Outgoing, Strand, window
from peerd.policy.route.parallel import MOST


@given(seed=st.integers(0, 1 << 32), num_strands=st.integers(1, 6), breaks=st.sampled_from([0.0, 0.05]))
def test_what_goes_over_strands_of_any_pace_arrives_in_order(seed: int, num_strands: int, breaks: float) -> None:
    chance, outgoing, incoming = random.Random(seed), Outgoing(), Incoming()
    sent = [bytes([number % 251]) * 3 for number in range(2 * WINDOW)]
    left, arrived, now_s = list(sent), list[bytes](), 0.0
    strands = {Strand(): list[tuple[int, bytes]]() for _ in range(num_strands)}
    while len(arrived) < len(sent):
        now_s += 0.1
        while left and outgoing.has_room(len(strands)):
            outgoing.put(left.pop(0))
        strand = chance.choice(list(strands))
        if chance.random() < breaks:
            outgoing.lost(strand)
            del strands[strand]
            strands[Strand()] = []
            continue
        taken = outgoing.take(strand, now_s)
        if taken is not None:
            strands[strand].append(taken)
        assert len(strand.under_way) <= EACH
        if strands[strand] and chance.random() < 0.5:
            incoming.put(*strands[strand].pop(0))
            strand.came += 1
            while (data := incoming.next()) is not None:
                arrived.append(data)
                incoming.passed_on += 1
            outgoing.arrived(strand, strand.came, incoming.passed_on, now_s)
    assert arrived == sent


def test_a_block_that_is_late_on_one_strand_goes_over_another_one_too() -> None:
    outgoing, slow, quick = Outgoing(), Strand(), Strand()
    outgoing.put(b"first")
    assert outgoing.take(slow, 0.0) == (0, b"first")
    assert outgoing.take(quick, outgoing.late_s) is None
    assert outgoing.take(slow, 2 * outgoing.late_s) is None, "it is on its way there"
    assert outgoing.take(quick, 2 * outgoing.late_s) == (0, b"first")
    outgoing.arrived(quick, 1, 1, 2 * outgoing.late_s)
    assert outgoing.take(quick, 1e9) is None


def test_what_is_late_follows_from_how_long_blocks_take() -> None:
    outgoing, strand = Outgoing(), Strand()
    for number in range(200):
        outgoing.put(b"data")
        outgoing.take(strand, float(number))
        outgoing.arrived(strand, number + 1, number + 1, number + 0.25)
    assert outgoing.late_s == pytest.approx(LATE * 0.25, rel=0.01)


def test_a_strand_takes_no_more_than_few_blocks_and_no_stream_more_than_a_window() -> None:
    outgoing, strand = Outgoing(), Strand()
    while outgoing.has_room(MOST):
        outgoing.put(b"data")
    assert [outgoing.take(strand, 0.0) is not None for _ in range(EACH + 1)] == [True] * EACH + [False]
    outgoing.arrived(strand, 10 * WINDOW, 10 * WINDOW, 0.0)
    assert not outgoing.has_room(MOST), "nobody has passed on what was never put"


@pytest.mark.parametrize("num_strands", [1, 5, MOST])
def test_so_much_is_ahead_as_passes_while_one_block_is_late_and_comes_over_another_strand(num_strands: int) -> None:
    """In each unit of time each strand carries what is under way on it; the very first block is lost."""
    outgoing, strands = Outgoing(), [Strand() for _ in range(num_strands)]
    came = [0] * num_strands
    carried = 0
    for _ in range(LATE + 1):
        for strand in strands:
            while len(strand.under_way) < EACH and outgoing.has_room(num_strands):
                outgoing.put(b"data")
                carried += outgoing.take(strand, 0.0) is not None
        for number, strand in enumerate(strands):
            came[number] += len(strand.under_way)
            outgoing.arrived(strand, came[number], 0, 0.0)
    assert carried == window(num_strands) == (LATE + 1) * EACH * num_strands <= WINDOW
    assert not outgoing.has_room(num_strands)


@pytest.mark.parametrize(("number", "size"), [(WINDOW, 1), (1 << 60, 1), (0, BLOCK_BYTES + 1)])
def test_a_block_that_is_not_due_or_too_long_is_refused(number: int, size: int) -> None:
    with pytest.raises(BadMessageError):
        Incoming().put(number, bytes(size))
