"""Converts between tensors and bytes. Runs on the torch thread, never on the event loop."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from peerd.config.codec import NONE, Codec
from peerd.link.links import CHUNK_BYTES, Bytes
from peerd.wire import codecs
from peerd.wire.messages import TensorBytes

_DTYPES = {"float32": torch.float32, "int32": torch.int32}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode(tensor: Tensor, codec: Codec = NONE) -> TensorBytes:
    """Encode a float32 or int32 tensor in chunks. Without a lossy codec they are views of its memory, which must not change any more."""
    if codec.is_lossy:
        packed = codecs.encode(codec, tensor.detach().float().reshape(-1)).cpu()
        return TensorBytes("float32", tuple(tensor.shape), views_of_flat(packed), codec)
    flat = tensor.detach().to("cpu").contiguous()
    return TensorBytes(_NAMES[flat.dtype], tuple(flat.shape), views_of_flat(flat.view(-1)))


def decode(value: TensorBytes, device: torch.device) -> Tensor:
    """Decode a tensor whose chunks have exactly its size. Raises BadMessageError if the codec cannot decode them."""
    if value.codec.is_lossy:
        packed = decode_flat(value.chunks, torch.uint8).to(device)
        return codecs.decode(value.codec, packed, value.num_values).view(value.shape)
    flat = decode_flat(value.chunks, _DTYPES[value.dtype])
    return flat.view(value.shape).to(device)


def encode_flat(flat: Tensor) -> tuple[bytes, ...]:
    """Return the bytes of a contiguous CPU vector in chunks, copied."""
    return tuple(map(bytes, views_of_flat(flat)))


def views_of_flat(flat: Tensor) -> tuple[memoryview, ...]:
    """Return chunks that are views of a contiguous CPU vector. Its memory must not change until they are sent."""
    view = memoryview(flat.numpy().data).cast("B") if flat.numel() else memoryview(b"")
    return tuple(view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))


def decode_into(flat: Tensor, chunks: Sequence[Bytes]) -> None:
    """Copy chunks of exactly its size into a contiguous CPU vector."""
    view, start = memoryview(flat.numpy().data).cast("B") if flat.numel() else memoryview(b""), 0
    for chunk in chunks:
        view[start : start + len(chunk)] = chunk
        start += len(chunk)


def decode_flat(chunks: Sequence[Bytes], dtype: torch.dtype) -> Tensor:
    """Return a vector from chunks. They are copied once, so that the result is writable and owns its memory."""
    total = sum(len(chunk) for chunk in chunks)
    if total == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(bytearray().join(chunks), dtype=dtype)


def file_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[Bytes, ...]:
    """Return a safetensors file of float32 CPU tensors in pieces: its header, then views of the tensors, which must not change any more.

    https://huggingface.co/docs/safetensors: 8 bytes of length, JSON padded to a multiple of 8, the tensors one after another.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    pieces, start = list[Bytes](), 0
    for name, tensor in sorted(tensors.items()):
        assert tensor.dtype == torch.float32
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, start + tensor.nbytes]}
        start += tensor.nbytes
        if tensor.numel():
            pieces.append(memoryview(tensor.detach().contiguous().view(-1).numpy().data).cast("B"))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return (len(text).to_bytes(8, "little") + text, *pieces)


def take(chunks: Sequence[Bytes], *values: TensorBytes) -> list[TensorBytes]:
    """Split joined chunks among several tensors, in order and without copying."""
    left = [memoryview(chunk) for chunk in reversed(chunks)]
    taken = []
    for value in values:
        pieces: list[Bytes] = []
        missing = value.num_bytes
        while missing > 0:
            piece = left.pop()
            if len(piece) > missing:
                left.append(piece[missing:])
            pieces.append(piece[:missing])
            missing -= len(pieces[-1])
        taken.append(value.with_chunks(tuple(pieces)))
    return taken
