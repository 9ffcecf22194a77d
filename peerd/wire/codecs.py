"""Between float32 values and fewer bytes: pure functions over vectors, on whatever device they lie. Never on the event loop.

Contract: decoding gives the same bits on every device, so peers that decode the same bytes agree; a value that is not finite
stays so, for its receiver to refuse; any bytes of the right size decode or raise BadMessageError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peerd.config.codec import INT4_BLOCK, INT8_BLOCK, SCALE_BYTES, TOPK_CHUNK, Codec
from peerd.errors import BadMessageError

_HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST_INT8, _LARGEST_INT4 = 127, 7
_SMALLEST_PEAK = 1e-30
"""A block whose values are all smaller is sent as zeros: its scale could not be divided by."""
_POSITION = torch.int16


def encode(codec: Codec, values: Tensor) -> Tensor:
    """float32 [length] -> uint8 [codec.num_bytes(length)], on the same device."""
    if codec.is_half:
        return _to_half(values, _HALVES[codec.name]).view(torch.uint8)
    if codec.name == "int8":
        return _quantise(values, INT8_BLOCK, _LARGEST_INT8)
    if codec.name == "int4":
        return _paired(_quantise(values, INT4_BLOCK, _LARGEST_INT4), values.numel())
    if codec.name == "topk" and not codec.is_dense(values.numel()):
        return _keep_largest(codec, values)
    return values.contiguous().view(torch.uint8)


def decode(codec: Codec, data: Tensor, length: int) -> Tensor:
    """uint8 [codec.num_bytes(length)] -> float32 [length], on the same device."""
    if data.numel() != codec.num_bytes(length):
        raise BadMessageError(f"{data.numel()} bytes do not make {length} values as {codec}")
    if codec.is_half:
        return data.view(_HALVES[codec.name]).float()
    if codec.name == "int8":
        return _dequantise(data, length, INT8_BLOCK)
    if codec.name == "int4":
        return _dequantise(_unpaired(data, length), length, INT4_BLOCK)
    if codec.name == "topk" and not codec.is_dense(length):
        return _spread(codec, data, length)
    return data.view(torch.float32)


def through(codec: Codec, values: Tensor) -> Tensor:
    """A tensor as its receiver has it; the very same where nothing is lost."""
    if not codec.is_lossy:
        return values
    return decode(codec, encode(codec, values.detach().reshape(-1)), values.numel()).view(values.shape)


def _to_half(values: Tensor, kind: torch.dtype) -> Tensor:
    """Values beyond float16's range become its largest; infinity stays."""
    halves = values.to(kind)
    if kind is torch.float16 and halves.numel() and bool(halves.abs().amax() == torch.inf):
        most = torch.finfo(kind).max
        return torch.where(values.isinf(), values, values.clamp(-most, most)).to(kind)
    return halves


def _quantise(values: Tensor, block: int, largest: int) -> Tensor:
    """Per block its largest magnitude / `largest` as scale, and each value as the nearest multiple (Dettmers, arXiv 1511.04561)."""
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
    tiny = peaks < _SMALLEST_PEAK  # false for a block with NaN, whose scale is to be NaN and whose codes do not matter
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


def _paired(packed: Tensor, length: int) -> Tensor:
    """The codes behind the scales, -7 to 7, as 8 more in 4 bits each: two to a byte, the first in its lower half."""
    border = packed.numel() - length
    codes = (packed[border:].view(torch.int8) + 8).view(torch.uint8) & 15
    if length % 2:
        codes = torch.cat([codes, codes.new_full((1,), 8)])
    return torch.cat([packed[:border], codes[::2] | (codes[1::2] << 4)])


def _unpaired(data: Tensor, length: int) -> Tensor:
    border = data.numel() - -(-length // 2)
    codes = torch.stack([data[border:] & 15, data[border:] >> 4], dim=1).view(-1)[:length]
    return torch.cat([data[:border], (codes.view(torch.int8) - 8).view(torch.uint8)])


def _keep_largest(codec: Codec, values: Tensor) -> Tensor:
    """Of each chunk the values of largest magnitude in rising position: all values, then all positions."""
    border = values.numel() // TOPK_CHUNK * TOPK_CHUNK
    rows = [values[:border].view(-1, TOPK_CHUNK), values[border:].view(1, -1)]
    places = [row.abs().topk(codec.kept(row.shape[1]), dim=1, sorted=False).indices.sort(dim=1).values for row in rows]
    kept = [row.gather(1, place).reshape(-1) for row, place in zip(rows, places, strict=True)]
    positions = torch.cat([place.reshape(-1) for place in places]).to(_POSITION)
    return torch.cat([torch.cat(kept).contiguous().view(torch.uint8), positions.view(torch.uint8)])


def _spread(codec: Codec, data: Tensor, length: int) -> Tensor:
    num_kept, border = codec.num_kept(length), length // TOPK_CHUNK * TOPK_CHUNK
    kept, positions = data[: 4 * num_kept].view(torch.float32), data[4 * num_kept :].view(_POSITION).long()
    values = torch.zeros(length, dtype=torch.float32, device=data.device)
    split = length // TOPK_CHUNK * codec.kept(TOPK_CHUNK)
    for row, places, given in (
        (values[:border].view(-1, TOPK_CHUNK), positions[:split], kept[:split]),
        (values[border:].view(1, -1), positions[split:], kept[split:]),
    ):
        if not row.numel():
            continue
        places = places.view(row.shape[0], -1)
        rising = bool((places[:, 1:] > places[:, :-1]).all())
        if not rising or bool((places[:, :1] < 0).any()) or bool((places[:, -1:] >= row.shape[1]).any()):
            raise BadMessageError("positions that are outside the tensor or do not rise")
        row.scatter_(1, places, given.view_as(places))
    return values
