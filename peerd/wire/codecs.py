"""Compression of float32 vectors: pure functions that work on any device. Call nothing here on the event loop.

Contract: decoding gives the same bits on every device, so peers that decode the same bytes agree. A value that is not finite
stays so, and its receiver refuses it. Any bytes of the right size decode or raise BadMessageError.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from peerd.config.codec import SCALE_BYTES, TOPK_CHUNK, Codec, CodecSpec
from peerd.errors import BadMessageError
from peerd.wire import sparse

_KEEPING = ("topk", "sparse")
"""Codecs that keep some values of each chunk, with their positions, unless all values are no more bytes."""
_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_SMALLEST_PEAK = 1e-30
"""A block whose values are all smaller in magnitude is sent as zeros, because its scale is too small to divide by."""
_POSITION = torch.int16


def encode(codec: Codec, values: Tensor) -> Tensor:
    """float32 [length] -> uint8 [codec.num_bytes(length)], on the same device."""
    spec = codec.spec
    if codec.name in _HALVES:
        return _to_half(values, _HALVES[codec.name]).view(torch.uint8)
    if spec.block:
        packed = _quantise(values, spec)
        return packed if spec.bits == 8 else _narrowed(packed, values.numel(), spec.bits)
    if codec.name in _KEEPING and not codec.is_dense(values.numel()):
        return sparse.encode(codec, values) if codec.is_sparse else _keep_largest(codec, values)
    return values.contiguous().view(torch.uint8)


def decode(codec: Codec, data: Tensor, length: int) -> Tensor:
    """uint8 [codec.num_bytes(length)] -> float32 [length], on the same device. Raises BadMessageError for bytes that no tensor makes."""
    check(codec, data, length)
    return unpack(codec, data, length)


def check(codec: Codec, data: Tensor, length: int) -> None:
    """Raise BadMessageError unless these bytes decode. The processor reads them: it would wait for another device."""
    if data.numel() != codec.num_bytes(length):
        raise BadMessageError(f"{data.numel()} bytes do not make {length} values as {codec}")
    if codec.name in _KEEPING and not codec.is_dense(length):
        (sparse.check if codec.is_sparse else _check_positions)(codec, data, length)


def unpack(codec: Codec, data: Tensor, length: int) -> Tensor:
    """Decode bytes that `check` has passed."""
    spec = codec.spec
    if codec.name in _HALVES:
        return data.view(_HALVES[codec.name]).float()
    if spec.block:
        return _dequantise(data if spec.bits == 8 else _widened(data, length, spec.bits), length, spec.block)
    if codec.name in _KEEPING and not codec.is_dense(length):
        return sparse.decode(codec, data, length) if codec.is_sparse else _spread(codec, data, length)
    return data.view(torch.float32)


def through(codec: Codec, values: Tensor) -> Tensor:
    """Return the tensor that a receiver would decode; `values` itself if the codec is lossless."""
    if not codec.is_lossy:
        return values
    return decode(codec, encode(codec, values.detach().reshape(-1)), values.numel()).view(values.shape)


def _to_half(values: Tensor, kind: torch.dtype) -> Tensor:
    """Convert to float16 or bfloat16. Finite values beyond float16's range become its largest value; infinity stays."""
    halves = values.to(kind)
    is_asked = values.device.type == "cpu"  # another device would have to be waited for, and clamps in less time
    if kind is torch.float16 and halves.numel() and not (is_asked and bool(halves.abs().amax() < torch.inf)):
        most = torch.finfo(kind).max
        return torch.where(values.isinf(), values, values.clamp(-most, most)).to(kind)
    return halves


def _quantise(values: Tensor, spec: CodecSpec) -> Tensor:
    """Quantise each block to multiples of its scale, which is the largest magnitude / the largest code (Dettmers, arXiv 1511.04561)."""
    block, largest = spec.block, (1 << spec.bits - 1) - 1
    length, full = values.numel(), values.numel() // block
    num_blocks = -(-length // block)
    packed = torch.empty(SCALE_BYTES * num_blocks + length, dtype=torch.uint8, device=values.device)
    scales, codes = packed[: SCALE_BYTES * num_blocks].view(torch.float32), packed[SCALE_BYTES * num_blocks :].view(torch.int8)
    border = full * block
    if full:
        _quantise_rows(values[:border].view(full, block), scales[:full], codes[:border].view(full, block), largest)
    if border < length:
        _quantise_rows(values[border:].view(1, -1), scales[full:], codes[border:].view(1, -1), largest)
    return packed


def _quantise_rows(rows: Tensor, scales: Tensor, codes: Tensor, largest: int) -> None:
    peaks = torch.maximum(rows.amax(dim=1), -rows.amin(dim=1))
    tiny = peaks < _SMALLEST_PEAK  # false for a block with NaN: its scale becomes NaN, and its codes do not matter
    scales.copy_(torch.where(tiny, 0.0, peaks / largest))
    factors = torch.where(tiny | ~peaks.isfinite(), 0.0, largest / peaks)
    codes.copy_((rows * factors[:, None]).round_())


def _dequantise(data: Tensor, length: int, block: int) -> Tensor:
    num_blocks, full = -(-length // block), length // block
    scales, codes = data[: SCALE_BYTES * num_blocks].view(torch.float32), data[SCALE_BYTES * num_blocks :].view(torch.int8)
    values = codes.float()
    border = full * block
    values[:border].view(full, block).mul_(scales[:full, None])
    values[border:].mul_(scales[full:])
    return values


def _narrowed(packed: Tensor, length: int, bits: int) -> Tensor:
    """Pack the 8-bit codes after the scales into `bits` bits each: shifted to be non-negative, the lowest bits first."""
    border, together = packed.numel() - length, _together(bits)
    codes = (packed[border:].view(torch.int8) + (1 << bits - 1)).view(torch.uint8) & (1 << bits) - 1
    words = functional.pad(codes, (0, -length % together))
    for kind, half, taken in _merges(bits):
        words = words.view(kind)
        low = words & (1 << taken) - 1
        words = words.bitwise_xor_(low).bitwise_right_shift_(half - taken).bitwise_or_(low)
    used = words.view(torch.uint8).view(-1, together)[:, : bits * together // 8].reshape(-1)
    return torch.cat([packed[:border], used[: -(-bits * length // 8)]])


def _widened(data: Tensor, length: int, bits: int) -> Tensor:
    border, together = data.numel() - -(-bits * length // 8), _together(bits)
    used = bits * together // 8
    words = functional.pad(data[border:], (0, -(data.numel() - border) % used)).view(-1, used)
    words = functional.pad(words, (0, together - used))
    for kind, half, taken in reversed(_merges(bits)):
        words = words.view(kind)
        low = words & (1 << taken) - 1
        words = words.bitwise_xor_(low).bitwise_left_shift_(half - taken).bitwise_or_(low)
    codes = words.view(torch.int8).view(-1)[:length] - (1 << bits - 1)
    return torch.cat([data[:border], codes.view(torch.uint8)])


def _together(bits: int) -> int:
    """Return the smallest number of codes that fill whole bytes: 2, 4 or 8."""
    return 8 // math.gcd(bits, 8)


def _merges(bits: int) -> list[tuple[torch.dtype, int, int]]:
    """Return the steps that merge neighbouring codes in pairs: the merged word's type, the bits of each half, and the bits in use."""
    kinds = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [(kind, 4 * merged, bits * merged // 2) for merged, kind in kinds.items() if merged <= _together(bits)]


def _keep_largest(codec: Codec, values: Tensor) -> Tensor:
    """Pack the values of largest magnitude of each chunk, in rising position: first all values, then all positions."""
    border = values.numel() // TOPK_CHUNK * TOPK_CHUNK
    rows = [values[:border].view(-1, TOPK_CHUNK), values[border:].view(1, -1)]
    places = [row.abs().topk(codec.kept(row.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values for row in rows]
    kept = [row.gather(1, place).reshape(-1) for row, place in zip(rows, places, strict=True)]
    positions = torch.cat([place.reshape(-1) for place in places]).to(_POSITION)
    return torch.cat([torch.cat(kept).contiguous().view(torch.uint8), positions.view(torch.uint8)])


def _spread(codec: Codec, data: Tensor, length: int) -> Tensor:
    values = torch.zeros(length, dtype=torch.float32, device=data.device)
    kept, split = data[: 4 * codec.num_kept(length)].view(torch.float32), length // TOPK_CHUNK * codec.kept(TOPK_CHUNK)
    rows = values[: length // TOPK_CHUNK * TOPK_CHUNK].view(-1, TOPK_CHUNK), values[length // TOPK_CHUNK * TOPK_CHUNK :].view(1, -1)
    for row, places, given in zip(rows, _positions(codec, data, length), (kept[:split], kept[split:]), strict=True):
        if row.numel():
            row.scatter_(1, places.long(), given.view_as(places))
    return values


def _check_positions(codec: Codec, data: Tensor, length: int) -> None:
    for places, width in zip(_positions(codec, data, length), (TOPK_CHUNK, length % TOPK_CHUNK), strict=True):
        rising = bool((places[:, 1:] > places[:, :-1]).all())
        if not rising or bool((places[:, :1] < 0).any()) or bool((places[:, -1:] >= width).any()):
            raise BadMessageError("the positions are outside the tensor or do not rise")


def _positions(codec: Codec, data: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """The places of the kept values: [whole chunks, kept] and [1, kept of the rest]."""
    positions = data[4 * codec.num_kept(length) :].view(_POSITION)
    split = length // TOPK_CHUNK * codec.kept(TOPK_CHUNK)
    return positions[:split].view(length // TOPK_CHUNK, -1) if split else positions[:0].view(0, 1), positions[split:].view(1, -1)
