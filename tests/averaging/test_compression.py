"""Error feedback: what compression leaves out is sent later, and what a failed round left out is not."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from peerd.averaging.compression import Compression, Elements
from peerd.config.codec import CODECS, averaged_codecs, parse_allowed, parse_averaged
from peerd.errors import BadMessageError
from peerd.table.record import AverageId

LENGTH = 301
SHAPES = [(12, 20), (30,), (5, 2, 3)]
"""Of parameters that make that length with the sum of losses."""
LOSSY = [*(spec.example for spec in CODECS if spec.error), "powersgd:2"]


def whole(codec: str) -> Elements:
    allowed = parse_averaged(codec)
    return Compression(allowed, torch.float64, SHAPES).piece(LENGTH, 0, LENGTH, allowed.most_exact)


def gradient(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(LENGTH, generator=torch.Generator().manual_seed(step), dtype=dtype)


@given(st.sampled_from(LOSSY), st.lists(st.booleans(), min_size=1, max_size=12))
def test_what_was_told_and_what_is_left_add_up_to_what_there_was(codec: str, rounds: list[bool]) -> None:
    """Rounds that fail are made again with the same values; nothing of them counts. Each codec says what share of the rest is kept."""
    compression = Compression(parse_averaged(codec), torch.float64, SHAPES)
    where, rest = whole(codec), torch.zeros(LENGTH, dtype=torch.float64)
    for step, succeeds in enumerate(rounds):
        values = gradient(step)
        if not succeeds:
            compression.sent(compression.parts, AverageId(b"failed" + bytes([step])), where, values)
        part, chunks = compression.sent(compression.parts, AverageId(bytes([step])), where, values)
        assert torch.equal(compression.received(chunks, where), part)
        assert sum(map(len, chunks)) == compression.num_bytes(where)
        compression.applied([AverageId(bytes([step]))])
        rest = values + where.codec.spec.decay * rest - part
    left = compression.parts.left_out
    assert left is not None
    assert torch.allclose(left, rest, rtol=0, atol=1e-12)
    assert float(left[-1]) == 0.0, "the sum of losses travels exactly"


def test_a_round_that_came_to_nothing_moves_no_basis() -> None:
    """The parts of the next one are the same bytes, and only what is applied is where the next iteration starts."""
    compression, where = Compression(parse_averaged("powersgd:2"), torch.float32, SHAPES), whole("powersgd:2")
    values = gradient(0, torch.float32)
    failed, again = (compression.sent(compression.parts, AverageId(name), where, values)[0] for name in (b"failed", b"again"))
    assert torch.equal(failed, again)
    assert compression.parts.bases == {}
    compression.applied([AverageId(b"again")])
    assert {number: tuple(basis.shape) for number, basis in compression.parts.bases.items()} == {0: (20, 2), 2: (6, 2)}
    assert compression.sums.bases == {}


def test_with_feedback_top_k_follows_a_steady_gradient_that_naive_top_k_never_sees() -> None:
    steady = gradient(0)
    feedback, naive = Compression(parse_allowed("topk:0.1"), torch.float64), Compression(parse_allowed("topk:0.1"), torch.float64)
    sums = [torch.zeros_like(steady), torch.zeros_like(steady)]
    for step in range(100):
        for number, compression in enumerate((feedback, naive)):
            sums[number] += compression.sent(compression.parts, AverageId(bytes([step])), whole("topk:0.1"), steady)[0]
        feedback.applied([AverageId(bytes([step]))])
    errors = [float((total / 100 - steady).norm() / steady.norm()) for total in sums]
    assert errors[0] < 0.1
    assert errors[1] > 0.5


def test_what_is_kept_at_home_is_whole_and_clears_what_was_left_out() -> None:
    compression = Compression(parse_allowed("topk:0.1"), torch.float64)
    where = whole("topk:0.1")
    part, _ = compression.sent(compression.parts, AverageId(b"a"), where, gradient(0))
    compression.applied([AverageId(b"a")])
    everything = compression.kept(compression.parts, AverageId(b"b"), where, gradient(1))
    assert torch.allclose(everything + part, gradient(0) + gradient(1))
    compression.applied([AverageId(b"b")])
    assert compression.parts.left_out is not None
    assert not bool(compression.parts.left_out.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_codec_the_very_bits_travel(dtype: torch.dtype) -> None:
    compression = Compression(parse_allowed("none"), dtype)
    values = gradient(0, dtype)
    part, chunks = compression.sent(compression.parts, AverageId(b"a"), whole("none"), values)
    assert part is values
    assert torch.equal(compression.received(chunks, whole("none")), values)
    assert compression.parts.left_out is None


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("num_pieces", [1, 3, 150])
def test_what_is_no_gradient_loses_no_digit_wherever_the_cuts_are(codec: str, num_pieces: int) -> None:
    """The number of overflows and the losses: a rounded one would count an overflow as none."""
    values = 1000 * gradient(0, torch.float64)
    values[-3:] = torch.tensor([1.0, 3.0, 0.123456789], dtype=torch.float64)
    allowed = parse_averaged(codec)
    compression, found = Compression(allowed, torch.float64, SHAPES[:-1], num_exact=3), []
    for start, end in pairwise([LENGTH * number // num_pieces for number in range(num_pieces + 1)]):
        where = compression.piece(LENGTH, start, end, allowed.most_exact)
        part, chunks = compression.sent(compression.parts, AverageId(b"a"), where, values[where.start : where.end])
        assert sum(map(len, chunks)) == compression.num_bytes(where)
        assert torch.equal(compression.received(chunks, where), part)
        found.append(part)
    assert torch.equal(torch.cat(found)[-3:], values[-3:])


def test_a_part_that_is_not_finite_is_refused() -> None:
    compression = Compression(parse_allowed("int8"), torch.float32)
    with pytest.raises(BadMessageError, match="not finite"):
        compression.received([b"\xff" * compression.num_bytes(whole("int8"))], whole("int8"))


@given(st.lists(st.sampled_from([*map(str, parse_allowed("auto:topk:0.1").codecs)]), min_size=1, max_size=12))
def test_what_one_rounds_codec_left_out_the_next_ones_makes_up_for(codecs: list[str]) -> None:
    """With `auto` a leader may name another codec in each round; after an exact one nothing is left out."""
    compression = Compression(parse_allowed("auto:topk:0.1"), torch.float32)
    told, wanted = torch.zeros(LENGTH), torch.zeros(LENGTH)
    for step, codec in enumerate(codecs):
        values, where = gradient(step, torch.float32), whole(codec)
        part, chunks = compression.sent(compression.parts, AverageId(bytes([step])), where, values)
        assert torch.equal(compression.received(chunks, where), part)
        assert sum(map(len, chunks)) == compression.num_bytes(where)
        compression.applied([AverageId(bytes([step]))])
        told, wanted = told + part, wanted + values
    left = compression.parts.left_out
    assert left is not None
    assert torch.allclose(told + left, wanted, rtol=0, atol=1e-4)
    assert codecs[-1] != "none" or not bool(left.any())


@pytest.mark.parametrize("num_members", [2, 3, 4, 8, 32])
def test_parts_for_all_are_never_fewer_bytes_than_parts_and_sums_of_slices(num_members: int) -> None:
    """So there is no second way to average sparsely: sums are as sparse as parts."""
    length, compression = 4_000_000, Compression(parse_averaged("sparse:64"), torch.float32)
    bounds = [length * number // num_members for number in range(num_members + 1)]
    slices = [compression.num_bytes(compression.piece(length, *ends, compression.allowed.most_exact)) for ends in pairwise(bounds)]
    for_all = (num_members - 1) * compression.num_bytes(compression.piece(length, 0, length, compression.allowed.most_exact))
    by_slices = [sum(slices) - mine + (num_members - 1) * mine for mine in slices]
    assert max(by_slices) <= 1.001 * for_all
    assert max(by_slices) == pytest.approx(for_all * 2 / num_members, rel=0.005)  # small slices have headers, too


def test_a_sparse_codec_is_for_local_steps_alone() -> None:
    compression = Compression(averaged_codecs("sparse:64", 3), torch.float32)
    assert [str(compression.codec_of("", step)) for step in (0, 2, 3, 4)] == ["none", "none", "sparse:64", "sparse:64"]
    assert compression.codec_of("sparse:64", 3) is None, "no leader names one"
    assert [str(codec) for codec in averaged_codecs("int8", 3).at(0)] == ["int8"]


@pytest.mark.parametrize(
    ("allowed", "named", "expected"),
    [("int8", "", "int8"), ("int8", "int8", None), ("auto", "int8", "int8"), ("auto", "", "none"), ("auto:int8", "topk:0.1", None)],
)
def test_a_leader_names_a_codec_only_where_and_as_the_run_allows(allowed: str, named: str, expected: str | None) -> None:
    codec = Compression(parse_allowed(allowed), torch.float32).codec_of(named, 0)
    assert (None if codec is None else str(codec)) == expected
