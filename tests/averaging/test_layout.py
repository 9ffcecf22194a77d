"""The chunks of a round are the accumulator, each element once, whatever the shares are and wherever parameters end."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from peerd.averaging.compression import Compression
from peerd.averaging.layout import RoundLayout, shares_of
from peerd.config.codec import CODECS, parse_averaged
from peerd.policy.step.roster import WHOLE, Roster, RosterEntry
from peerd.table.record import PeerId

NAMES = ["none", *(spec.example for spec in CODECS if spec.error), "powersgd:2"]
weights = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


@st.composite
def layouts(draw: st.DrawFn, lossy: bool = True) -> tuple[RoundLayout, Compression, int, int]:
    """A layout, with the number of elements and of those that lose no digit."""
    shapes = draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3).map(tuple), min_size=1, max_size=6))
    num_exact = draw(st.integers(1, 3))
    length = sum(map(math.prod, shapes)) + num_exact
    allowed = parse_averaged(draw(st.sampled_from(NAMES)) if lossy else "none")
    compression = Compression(allowed, torch.float64, shapes, num_exact)
    drawn = draw(weights)
    shares = draw(st.sampled_from([(), shares_of([weight / sum(drawn) for weight in drawn])]))
    entries = tuple(RosterEntry(PeerId(f"p{number}"), 0, 0, 0) for number in range(len(drawn)))
    roster = Roster(0, 0, 0, PeerId("p0"), entries, (), shares, draw(st.integers(1, 40)))
    return RoundLayout(roster, length, compression, len(drawn) * [allowed.most_exact]), compression, length, num_exact


@given(layouts())
def test_chunks_cover_the_accumulator_once_and_exact_elements_are_in_the_last_ones(
    drawn: tuple[RoundLayout, Compression, int, int],
) -> None:
    layout, _, length, num_exact = drawn
    position = exact = 0
    for member in range(layout.num_members):
        pieces = [layout.piece(member, number, member) for number in range(layout.num_chunks)]
        for piece in pieces:
            assert piece.start == position <= piece.end
            assert piece.num_exact == max(0, piece.end - max(piece.start, length - num_exact))
            position, exact = piece.end, exact + piece.num_exact
        assert layout.is_empty(member) == (pieces[0].start == pieces[-1].end)
        assert layout.chunks_of(member) == (0 if layout.is_empty(member) else layout.num_chunks)
    assert (position, exact) == (length, num_exact)


@given(layouts())
def test_the_size_of_a_slice_is_that_of_its_chunks_and_of_what_is_sent(drawn: tuple[RoundLayout, Compression, int, int]) -> None:
    layout, compression, length, _ = drawn
    values = torch.randn(length, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for member in range(layout.num_members):
        sizes = []
        for number in range(layout.chunks_of(member)):
            where = layout.piece(member, number, member)
            if where.end > where.start:
                _, sent = compression.sent(compression.parts, b"", where, values[where.start : where.end])  # type: ignore[arg-type]
                assert sum(map(len, sent)) == layout.num_bytes(member, number, member)
            sizes.append(layout.num_bytes(member, number, member))
        assert layout.slice_bytes[member] == sum(sizes)


@given(layouts(lossy=False))
def test_chunks_of_a_slice_differ_by_one_element_at_most(drawn: tuple[RoundLayout, Compression, int, int]) -> None:
    layout, *_ = drawn
    for member in range(layout.num_members):
        sizes = [layout.num_bytes(member, number, member) for number in range(layout.num_chunks)]
        assert max(sizes) - min(sizes) <= 8


def test_with_powersgd_cuts_lie_where_parameters_end_if_one_ends_near() -> None:
    shapes = [(10, 10), (9, 10), (11, 10)]
    compression = Compression(parse_averaged("powersgd:2"), torch.float64, shapes)
    entries = (RosterEntry(PeerId("p0"), 0, 0, 0),)
    layout = RoundLayout(Roster(0, 0, 0, PeerId("p0"), entries, num_chunks=3), 301, compression, [parse_averaged("powersgd:2").most_exact])
    bounds = [layout.piece(0, number, 0).start for number in range(3)]
    assert bounds == [0, 100, 190]


@given(weights)
def test_shares_make_a_whole_in_proportion_to_the_weights(drawn: list[int]) -> None:
    given_weights = [weight / sum(drawn) for weight in drawn]
    shares = shares_of(given_weights)
    assert sum(shares) == WHOLE
    assert all(share >= 0 for share in shares)
    assert all(abs(share - WHOLE * weight) <= len(drawn) for share, weight in zip(shares, given_weights, strict=True))
    assert all(
        one >= other
        for (weight, one), (less, other) in pairwise(sorted(zip(given_weights, shares, strict=True), reverse=True))
        if weight > less
    )
