"""Codecs: every vector comes back as near as its codec promises, in as many bytes as it says; any bytes decode or are refused."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from peerd.config.codec import CODECS, EXAMPLES, LADDER, TOPK_CHUNK, Codec, parse_allowed, parse_averaged, parse_codec
from peerd.errors import BadMessageError
from peerd.wire.codecs import decode, encode, through
from peerd.wire.tensors import decode as decode_tensor
from peerd.wire.tensors import decode_flat, take
from peerd.wire.tensors import encode as encode_tensor

NAMES = (*EXAMPLES, "topk:0.01", "topk:0.25", "topk:0.9", "topk:1")
SPARSE = ("sparse:64", "sparse:1", "sparse:3", "sparse:1024")
BLOCK = max(spec.block for spec in CODECS)
BELOW = {"float16": 65504.0}
"""Up to where the bound on the error holds."""
SMALLEST = {"bfloat16": 1e-38, "float16": 2.0**-25}
"""An error of this size is none: the codec has no smaller values. Others send what is below 1e-30 as zero."""


def parsed(name: str) -> Codec:
    return parse_averaged(name).most_exact


codecs = st.sampled_from([*NAMES, *SPARSE]).map(parsed)
CPU = torch.device("cpu")


def normal(length: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(length, generator=torch.Generator().manual_seed(seed))


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Odd lengths around blocks and chunks, odd magnitudes, zeros and ties among them."""
    length = draw(st.integers(0, 3 * BLOCK + 1) | st.integers(TOPK_CHUNK - 2, 2 * TOPK_CHUNK + 2))
    values = normal(length, draw(st.integers(0, 100)), 10.0 ** draw(st.integers(-38, 30)))
    if draw(st.booleans()):
        values[::2] = 0.0
    if draw(st.booleans()):
        values = values.sign() * draw(st.floats(2.0**-99, 2.0**99, width=32))
    return values


def reference_of(codec: Codec, values: Tensor) -> Tensor:
    """Of what each value's error is a share: of the value, or of the largest in its block."""
    size = codec.spec.block
    if not size or not values.numel():
        return values.abs()
    return torch.cat([block.abs().max().expand(len(block)) for block in values.split(size)])  # type: ignore[no-untyped-call]


@given(codecs, vectors())
@example(parse_codec("int8"), torch.full((5,), 1e-45))
def test_a_vector_comes_back_as_near_as_promised_in_as_many_bytes_as_told(codec: Codec, values: Tensor) -> None:
    packed = encode(codec, values)
    assert (packed.dtype, packed.numel()) == (torch.uint8, codec.num_bytes(values.numel()))
    back = decode(codec, packed, values.numel())
    assert (back.dtype, back.shape) == (values.dtype, values.shape)
    if codec.spec.bits:
        allowed = codec.spec.error * reference_of(codec, values)
        error, most = (back - values).abs(), BELOW.get(codec.name, math.inf)
        assert bool((error <= allowed + SMALLEST.get(codec.name, 1e-30))[values.abs() < most].all())
        assert bool((back.abs() <= most).all())
    elif codec.is_sparse and not codec.is_dense(values.numel()):
        assert_largest_are_kept(codec, values, back)
    else:
        assert bool(((back == values) | (back == 0)).all())
        for sent, given_ in zip(back.split(TOPK_CHUNK), values.split(TOPK_CHUNK), strict=True):  # type: ignore[no-untyped-call]
            left = given_[(sent == 0) & (given_ != 0)].abs()
            if left.numel():
                assert int((sent != 0).sum()) >= min(codec.kept(given_.numel()), int((given_ != 0).sum()))
                assert float(left.max()) <= float(sent[sent != 0].abs().min())


def assert_largest_are_kept(codec: Codec, values: Tensor, back: Tensor) -> None:
    """At their places, with their signs, and as one of two magnitudes between the least and the largest of their chunk."""
    for sent, given_ in zip(back.split(TOPK_CHUNK), values.split(TOPK_CHUNK), strict=True):  # type: ignore[no-untyped-call]
        kept, magnitudes = sent != 0, given_.abs().sort(descending=True).values[: codec.kept(given_.numel())]
        assert int(kept.sum()) <= len(magnitudes)
        assert bool((sent[kept].sign() == given_[kept].sign()).all())
        least, largest = float(magnitudes[-1]), float(magnitudes[0])
        assert bool((given_[kept].abs() >= least).all())
        assert len(sent[kept].abs().unique()) <= 2
        assert bool((sent[kept].abs() >= least * (1 - 2**-8)).all())
        assert bool((sent[kept].abs() <= largest * (1 + 2**-8)).all())
        if least > 1e-30:
            assert int(kept.sum()) == len(magnitudes)


@given(codecs, vectors())
def test_a_tensor_travels_as_chunks_and_its_receiver_has_what_through_gives(codec: Codec, values: Tensor) -> None:
    tensor = values.view(1, -1)
    sent = encode_tensor(tensor, codec)
    assert sum(map(len, sent.chunks)) == sent.num_bytes == codec.num_bytes(values.numel())
    assert torch.equal(decode_tensor(sent, CPU), through(codec, tensor))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.lists(st.integers(1, 40), max_size=6))
def test_tensors_that_travelled_together_are_told_apart_wherever_their_bytes_were_cut(lengths: list[int], cuts: list[int]) -> None:
    tensors = [normal(length, seed=length) for length in lengths]
    data = b"".join(chunk for tensor in tensors for chunk in encode_tensor(tensor).chunks)
    places = sorted({0, len(data), *(cut * len(data) // 40 for cut in cuts)})
    chunks = [data[start:end] for start, end in itertools.pairwise(places)]
    taken = take(chunks, *(encode_tensor(tensor).with_chunks(()) for tensor in tensors))
    assert all(torch.equal(decode_tensor(each, CPU), tensor) for each, tensor in zip(taken, tensors, strict=True))


@given(codecs, st.integers(0, 2 * BLOCK), st.integers(0, 2**32 - 1))
def test_any_bytes_make_values_or_are_refused(codec: Codec, length: int, seed: int) -> None:
    data = torch.randint(0, 256, (codec.num_bytes(length),), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    try:
        assert decode(codec, data, length).shape == (length,)
    except BadMessageError as error:
        assert "positions" in error.message
    if length:
        with pytest.raises(BadMessageError, match="do not make"):
            decode(codec, data[:-1], length)


@pytest.mark.parametrize("name", [*NAMES, *SPARSE])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 300, 5000])
def test_what_is_not_finite_stays_so(name: str, bad: float, place: int) -> None:
    values = normal(5001)
    values[place] = bad
    assert not bool(through(parsed(name), values).isfinite().all())


@pytest.mark.parametrize(
    ("positions", "fine"), [([0, 5], True), ([5, 0], False), ([3, 3], False), ([-1, 2], False), ([0, 8], False), ([0, 7], True)]
)
def test_positions_must_rise_inside_the_tensor(positions: list[int], fine: bool) -> None:
    codec = parse_codec("topk:0.25")
    data = torch.cat([torch.tensor([1.0, 2.0]).view(torch.uint8), torch.tensor(positions, dtype=torch.int16).view(torch.uint8)])
    if fine:
        assert decode(codec, data, 8)[positions].tolist() == [1.0, 2.0]
    else:
        with pytest.raises(BadMessageError, match="positions"):
            decode(codec, data, 8)


@pytest.mark.parametrize(
    ("places", "fine"), [([0, 4095], True), ([7, 7], False), ([9, 8], False), ([3, 5, 104], True), ([3, 5, 105], False)]
)
def test_places_of_the_sparse_codec_must_rise_inside_the_vector(places: list[int], fine: bool) -> None:
    """A vector of one chunk, of which two values are kept, or of a hundred values more with one of them."""
    codec, length = parsed("sparse:2"), TOPK_CHUNK if len(places) == 2 else TOPK_CHUNK + 105
    bits = sum(place << 12 * number for number, place in enumerate(places))
    levels = torch.tensor([1.0, 2.0] * -(-length // TOPK_CHUNK), dtype=torch.bfloat16).view(torch.uint8)
    signs = torch.tensor([0b10_01_00], dtype=torch.uint8)
    data = torch.cat([levels, signs, torch.frombuffer(bytearray(bits.to_bytes(-(-12 * len(places) // 8), "little")), dtype=torch.uint8)])
    if fine:
        where = [*places[:2], *(TOPK_CHUNK + place for place in places[2:])]
        assert decode(codec, data, length)[where].tolist() == [1.0, 2.0, -1.0][: len(places)]
    else:
        with pytest.raises(BadMessageError, match="positions"):
            decode(codec, data, length)


def test_the_sparse_codec_takes_a_seventh_of_a_hundredth_of_the_bytes_and_keeps_the_direction_of_what_it_keeps() -> None:
    codec, values = parsed("sparse:64"), normal(1 << 20)
    assert 4 * len(values) / codec.num_bytes(len(values)) == pytest.approx(141.2, abs=0.1)
    back = through(codec, values)
    kept = torch.where(back != 0, values, 0.0)
    assert int((back != 0).sum()) == len(values) // 64
    assert float(torch.nn.functional.cosine_similarity(back, kept, dim=0)) > 0.99


def test_each_codec_takes_its_share_of_the_bytes() -> None:
    length, halves = 1 << 20, {"none": 1, "bfloat16": 0.5, "float16": 0.5}
    integers = {"int8": 65 / 256, "int6": 25 / 128, "int5": 21 / 128, "int4": 17 / 128}
    shares = halves | integers | {"topk:0.01": 0.015, "topk:0.25": 0.375, "topk:0.9": 1, "topk:1": 1}
    assert {name: parse_codec(name).num_bytes(length) / (4 * length) for name in shares} == pytest.approx(shares, rel=0.01)


@pytest.mark.parametrize("codec", [codec for codec in map(parse_codec, EXAMPLES) if codec.spec.bits], ids=str)
def test_the_bound_on_a_codecs_error_is_nearly_reached(codec: Codec) -> None:
    values = normal(1 << 16)
    error = (through(codec, values) - values).abs() / reference_of(codec, values)
    assert 0.9 * codec.spec.error <= float(error.max()) <= codec.spec.error


def test_eight_bits_cost_seven_thousandths_of_normal_values() -> None:
    values = normal(1 << 16)
    error = (through(parse_codec("int8"), values) - values).pow(2).mean().sqrt() / values.pow(2).mean().sqrt()
    assert float(error) == pytest.approx(0.0066, rel=0.1)


@pytest.mark.parametrize(("bits", "expected"), [(6, 0.0266), (5, 0.055), (4, 0.118)])
def test_fewer_bits_cost_more_and_come_back_in_their_places(bits: int, expected: float) -> None:
    codec, values = parse_codec(f"int{bits}"), normal(1 << 16)
    error = (through(codec, values) - values).pow(2).mean().sqrt() / values.pow(2).mean().sqrt()
    assert float(error) == pytest.approx(expected, rel=0.1)
    largest = 2.0 ** (bits - 1) - 1
    steps = torch.arange(-largest, largest + 1)
    assert torch.equal(through(codec, steps), steps)


@pytest.mark.parametrize("name", [*NAMES, *SPARSE])
def test_a_codec_is_called_what_it_was_parsed_from(name: str) -> None:
    assert str(parsed(name)) == name


@pytest.mark.parametrize("text", ["sparse", "sparse:0", "sparse:1025", "sparse:01", "sparse:-1", "sparse:0.1", "auto:sparse:64"])
def test_other_numbers_of_sparse_values_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"codec|auto may go down"):
        parse_averaged(text)


def test_sparse_values_are_for_averages_alone() -> None:
    with pytest.raises(ValueError, match="is not a codec"):
        parse_allowed("sparse:64")


@pytest.mark.parametrize(
    "text", ["", "int3", "topk", "topk:0", "topk:0.0", "topk:2", "topk:-0.1", "topk:nan", "topk:1e-3", "INT8", 99 * "x"]
)
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a codec; known are"):
        parse_codec(text)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", [*NAMES, *SPARSE])
def test_a_gpu_decodes_to_the_same_bits(name: str) -> None:
    codec, values = parsed(name), normal(3 * TOPK_CHUNK + 77)
    packed = encode(codec, values)
    assert torch.equal(decode(codec, packed.cuda(), values.numel()).cpu(), decode(codec, packed, values.numel()))
    if not codec.is_sparse:  # whose means a GPU sums in another order
        assert torch.equal(encode(codec, values.cuda()).cpu(), packed)


@pytest.mark.parametrize("text", ["auto", "auto:topk:0.1", "auto:topk:0.01", *(f"auto:{codec}" for codec in LADDER[1:])])
def test_what_a_run_allows_goes_from_exact_to_small(text: str) -> None:
    allowed = parse_allowed(text)
    smallest = parse_codec(text.partition(":")[2] or str(LADDER[-1]))
    assert (allowed.codecs[0], allowed.codecs[-1]) == (LADDER[0], smallest)
    assert set(allowed.codecs[:-1]) == {codec for codec in LADDER if codec.num_bytes(TOPK_CHUNK) > smallest.num_bytes(TOPK_CHUNK)}
    assert parse_allowed(str(allowed)) == allowed
    sizes = [codec.num_bytes(TOPK_CHUNK) for codec in allowed.codecs]
    assert sizes == sorted(set(sizes), reverse=True)
    assert all(allowed.permits(codec) for codec in allowed.codecs)
    assert not allowed.permits(parse_codec("topk:0.2"))


@pytest.mark.parametrize("text", ["auto:", "auto:none", "auto:float16", "auto:topk:0.9", "auto:auto", "auto:topk", "automatic", "AUTO"])
def test_an_auto_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"codec|auto may go down"):
        parse_allowed(text)


def test_chunks_of_nothing_make_no_number() -> None:
    """What remains of a chunk after its whole blocks may be nothing."""
    assert decode_flat([b""], torch.float32).shape == (0,)
    assert decode_flat([], torch.float32).shape == (0,)
