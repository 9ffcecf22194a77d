"""Hypothesis strategies for what crosses the wire."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import strategies as st

from peerd.config.codec import EXAMPLES, parse_codec
from peerd.config.manifest import MAX_MICROBATCHES_PER_STEP
from peerd.policy.round.debts import Edge
from peerd.policy.step.groups import MAX_SECTIONS
from peerd.policy.step.roster import Credit, Roster, RosterEntry
from peerd.table.record import AverageId, PeerId
from peerd.wire.messages import ITEM_BYTES, Beat, Call, Carried, Frame, OutcomeWord, PlacedSlice, TensorBytes, Verified

peers = st.text("abcdefgh123", min_size=1, max_size=12).map(PeerId)
numbers = st.integers(0, (1 << 62) - 1)
bitmaps = st.integers(0, (1 << MAX_MICROBATCHES_PER_STEP) - 1) | st.integers(0, 255)
shapes = st.lists(st.integers(0, 6), min_size=1, max_size=4).map(tuple)


@st.composite
def tensors(draw: st.DrawFn) -> TensorBytes:
    """A tensor whose bytes travel separately."""
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    names = EXAMPLES if dtype == "float32" else ("none",)
    return TensorBytes(dtype, draw(shapes), (), parse_codec(draw(st.sampled_from(names))))


@st.composite
def calls(draw: st.DrawFn) -> Call:
    return Call(
        call_id=draw(st.binary(min_size=16, max_size=16)),
        stage=draw(st.integers(0, 4095)),
        step=draw(numbers),
        index=draw(st.integers(0, MAX_MICROBATCHES_PER_STEP - 1)),
        accumulate=draw(st.frozensets(st.integers(0, 4095), max_size=5)),
        inputs=draw(tensors()),
        labels=draw(tensors()),
        path=draw(st.dictionaries(st.integers(0, 4095), peers, max_size=4)),
        attempt=draw(st.integers(0, (1 << 32) - 1)),
        again=draw(st.booleans()),
        versions=draw(st.lists(st.sampled_from([b"", bytes(range(16))]), max_size=4).map(tuple)),
        gradient_codec=draw(st.none() | st.sampled_from(EXAMPLES).map(parse_codec)),
    )


sections = st.tuples(
    st.integers(0, 600), st.integers(1, MAX_SECTIONS), st.booleans(), st.lists(st.binary(max_size=16).map(AverageId), max_size=3).map(tuple)
)


@st.composite
def rosters(draw: st.DrawFn) -> Roster:
    """The ledgers are disjoint."""
    entries, held = list[RosterEntry](), 0
    for entry in draw(st.lists(st.builds(RosterEntry, peers, numbers, numbers, bitmaps), max_size=4)):
        entries.append(replace(entry, done=entry.done & ~held))
        held |= entry.done
    codecs = draw(st.just(()) | st.tuples(*(st.sampled_from(EXAMPLES) for _ in entries)))
    shares = draw(st.just(()) | st.tuples(*(st.integers(0, (1 << 32) - 1) for _ in entries)))
    rest = codecs, shares, draw(st.integers(0, (1 << 32) - 1)), draw(st.floats(allow_nan=False))
    credited, told = list[Credit](), 0
    for credit in draw(st.lists(st.builds(Credit, peers, bitmaps), max_size=3)):
        credited.append(replace(credit, done=credit.done & ~told))
        told |= credit.done
    return Roster(
        draw(st.integers(0, 4095)), draw(numbers), draw(numbers), draw(peers), tuple(entries), *rest, tuple(credited), *draw(sections)
    )


places = st.integers(0, (1 << 32) - 1)
frames = st.builds(Frame, places, places, places, places, st.binary(max_size=64))
verified = st.builds(Verified, places, places, places, st.lists(st.builds(Carried, *(6 * [places])), max_size=3).map(tuple))
hashes, signatures = st.binary(min_size=32, max_size=32), st.binary(max_size=64)
placed_slices = st.builds(PlacedSlice, places, hashes, signatures)
sorted_slices = st.lists(placed_slices, max_size=3, unique_by=lambda each: each.member).map(lambda found: tuple(sorted(found)))
outcome_words = st.builds(OutcomeWord, places, st.binary(min_size=16, max_size=16).map(AverageId), signatures, sorted_slices)


@st.composite
def beats(draw: st.DrawFn) -> Beat:
    edges = draw(st.lists(st.builds(Edge, places, places), max_size=3))
    carriers, carried = ({edge: draw(places) for edge in edges} for _ in range(2))
    parts, sums, given_parts, given_sums = (draw(st.lists(places, max_size=4).map(tuple)) for _ in range(4))
    average_id, still_ms = draw(st.binary(min_size=16, max_size=16).map(AverageId)), draw(st.integers(0, 4_000_000_000))
    told = tuple(draw(st.lists(outcome_words, max_size=3))), draw(st.integers(0, 1 << 40))
    return Beat(average_id, parts, sums, still_ms / 1000, given_parts, given_sums, carriers, carried, *told)


def bytes_of(tensor: TensorBytes) -> int:
    return ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape)
