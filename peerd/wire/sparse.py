"""The sparse codec: of each chunk the values of largest magnitude, as a place of 12 bits and a value of 2 bits.

SparseLoCo (arXiv 2508.15706) sends so what peers average once in many local updates; what is left out is made up for later.
A value's two bits are its sign and which of its chunk's two magnitudes it has: the means of the magnitudes on either side of their
common mean, in bfloat16. The bytes are all magnitudes, then all values, then all places, which rise within a chunk.

Contract: as that of wire/codecs.py, which calls this for lengths that are not dense in the codec.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from peerd.config.codec import LEVEL_BYTES, TOPK_CHUNK, Codec, bytes_of_places, bytes_of_signs
from peerd.errors import BadMessageError

_LARGEST = torch.finfo(torch.bfloat16).max


def encode(codec: Codec, values: Tensor) -> Tensor:
    """float32 [length] -> uint8 [codec.num_bytes(length)]."""
    border = values.numel() // TOPK_CHUNK * TOPK_CHUNK
    rows = [row for row in (values[:border].view(-1, TOPK_CHUNK), values[border:].view(1, -1)) if row.numel()]
    found = [_of_rows(row, codec.kept(row.shape[1])) for row in rows]
    levels, codes, places = (torch.cat([piece.reshape(-1) for piece in pieces]) for pieces in zip(*found, strict=True))
    return torch.cat([levels.view(torch.uint8), _pack_codes(codes), _pack_places(places)])


def check(codec: Codec, data: Tensor, length: int) -> None:
    """Raise BadMessageError unless the places rise inside the vector."""
    where = _where(codec, data, length)
    if bool((where[1:] <= where[:-1]).any()) or int(where[-1]) >= length:
        raise BadMessageError("the positions are outside the tensor or do not rise")


def decode(codec: Codec, data: Tensor, length: int) -> Tensor:
    """Decode bytes that `check` has passed."""
    kept, num_chunks = codec.num_kept(length), -(-length // TOPK_CHUNK)
    border = LEVEL_BYTES * num_chunks
    levels = data[:border].view(torch.bfloat16).float()
    packed = data[border : border + bytes_of_signs(kept)]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=data.device)
    codes = (packed[:, None] >> shifts & 3).view(-1)[:kept].long()
    where = _where(codec, data, length)
    magnitudes = levels[2 * (where // TOPK_CHUNK) + (codes & 1)]
    values = torch.zeros(length, dtype=torch.float32, device=data.device)
    values[where] = torch.where(codes >= 2, -magnitudes, magnitudes)
    return values


def _of_rows(rows: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [rows, width] -> bfloat16 [rows, 2], the magnitudes; codes and places [rows, kept]."""
    places = rows.abs().topk(kept, dim=1, sorted=False).indices.sort(dim=1).values
    values = rows.gather(1, places)
    magnitudes = values.abs()
    peaks = magnitudes.amax(dim=1, keepdim=True)
    shares = torch.where(peaks > 0, magnitudes / peaks, magnitudes)  # a value that is not finite makes its row NaN; no sum overflows
    middle = shares.mean(dim=1, keepdim=True)
    above = shares > middle
    low, high = ((shares * part).sum(dim=1, keepdim=True) / part.sum(dim=1, keepdim=True) for part in (~above, above))
    levels = torch.cat([low, torch.where(above.any(dim=1, keepdim=True), high, middle)], dim=1) * peaks
    return levels.clamp(max=_LARGEST).to(torch.bfloat16), (above + 2 * (values < 0)).to(torch.uint8), places


def _pack_codes(codes: Tensor) -> Tensor:
    four = functional.pad(codes, (0, -len(codes) % 4)).view(-1, 4)
    return four[:, 0] | four[:, 1] << 2 | four[:, 2] << 4 | four[:, 3] << 6


def _pack_places(places: Tensor) -> Tensor:
    pairs = functional.pad(places, (0, len(places) % 2)).view(-1, 2)
    words = pairs[:, 0] | pairs[:, 1] << 12
    packed = torch.stack([words & 255, words >> 8 & 255, words >> 16], dim=1).to(torch.uint8)
    return packed.view(-1)[: bytes_of_places(len(places))]


def _where(codec: Codec, data: Tensor, length: int) -> Tensor:
    """int64 [kept]: the place of each value in the whole vector."""
    kept, whole = codec.num_kept(length), length // TOPK_CHUNK
    packed = data[LEVEL_BYTES * -(-length // TOPK_CHUNK) + bytes_of_signs(kept) :]
    triples = functional.pad(packed, (0, -len(packed) % 3)).view(-1, 3).long()
    words = triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16
    places = torch.stack([words & 4095, words >> 12], dim=1).view(-1)[:kept]
    chunks = torch.arange(kept, device=data.device) // max(1, codec.kept(TOPK_CHUNK))
    return places + TOPK_CHUNK * chunks.clamp(max=whole)
