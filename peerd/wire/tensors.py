"""Converts between tensors and bytes. Runs on the torch thread, never on the event loop."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from peerd.config.codec import NONE, Codec
from peerd.link.links import CHUNK_BYTES, Bytes
from peerd.transfers import QueuedCopy, to_device, to_host
from peerd.wire import codecs
from peerd.wire.messages import TensorBytes

_DTYPES = {"float32": torch.float32, "int32": torch.int32}
_FILE_DTYPES = {"F32": torch.float32, "U8": torch.uint8}
"""Types of numbers in a file."""
_FILE_NAMES = {dtype: name for name, dtype in _FILE_DTYPES.items()}
_ALIGNMENT = 4
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def encode(tensor: Tensor, codec: Codec = NONE) -> TensorBytes:
    """Encode a float32 or int32 tensor in chunks. Without a lossy codec they are views of its memory, which must not change any more."""
    parcel = Parcel(codec)
    return parcel.encoded(*to_host(parcel.pack(tensor)))


def encode_microbatch(inputs: Tensor, labels: Tensor) -> tuple[TensorBytes, TensorBytes]:
    """Encode inputs and labels as the first stage takes them: tokens and labels are int32 on the wire."""
    return encode(inputs if inputs.is_floating_point() else inputs.int()), encode(labels.int())


class Parcel:
    """One tensor on its way out: packed on its device, and encoded once that has come to the machine's memory."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._shape: tuple[int, ...] = ()

    def pack(self, tensor: Tensor) -> Tensor:
        """Return a flat vector of what is sent, on the tensor's device."""
        self._shape = tuple(tensor.shape)
        if self._codec.is_lossy:
            return codecs.encode(self._codec, tensor.detach().float().reshape(-1))
        return tensor.detach().contiguous().view(-1)

    def encoded(self, flat: Tensor) -> TensorBytes:
        """Return its bytes, from what `pack` returned, in the machine's memory."""
        name = "float32" if self._codec.is_lossy else _NAMES[flat.dtype]
        return TensorBytes(name, self._shape, views_of_flat(flat), self._codec)


def decode(value: TensorBytes, device: torch.device) -> Tensor:
    """Decode a tensor whose chunks have exactly its size. Raises BadMessageError if the codec cannot decode them."""
    return _unpacked(value, to_device(_packed(value), device))


def decode_beside(value: TensorBytes, device: torch.device) -> Callable[[], Tensor]:
    """Begin to decode a tensor on any thread, with its copy to the device beside what is computed there (`has_copy_streams`).

    The function that is returned ends it on the thread that computes. Raises what `decode` raises.
    """
    arrival = QueuedCopy(_packed(value, pinned=True), device)
    return lambda: _unpacked(value, arrival.take())


def _packed(value: TensorBytes, *, pinned: bool = False) -> Tensor:
    """What travels of a tensor, in the machine's memory: the codec's bytes, or the numbers themselves."""
    if value.codec.is_lossy:
        packed = decode_flat(value.chunks, torch.uint8, pinned=pinned)
        codecs.check(value.codec, packed, value.num_values)
        return packed
    return decode_flat(value.chunks, _DTYPES[value.dtype], pinned=pinned)


def _unpacked(value: TensorBytes, packed: Tensor) -> Tensor:
    return (codecs.unpack(value.codec, packed, value.num_values) if value.codec.is_lossy else packed).view(value.shape)


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor in the machine's memory."""
    return memoryview(tensor.view(-1).numpy().data).cast("B") if tensor.numel() else memoryview(bytearray())


def views_of_flat(flat: Tensor) -> tuple[memoryview, ...]:
    """Return chunks that are views of a contiguous CPU vector. Its memory must not change until they are sent."""
    view = memory_of(flat)
    return tuple(view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))


def decode_into(flat: Tensor, chunks: Sequence[Bytes]) -> None:
    """Copy chunks of exactly its size into a contiguous CPU vector. Numpy lets other threads run meanwhile, and a memoryview does not."""
    view, start = np.frombuffer(memory_of(flat), np.uint8), 0
    for chunk in chunks:
        view[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
        start += len(chunk)


def decode_flat(chunks: Sequence[Bytes], dtype: torch.dtype, *, pinned: bool = False) -> Tensor:
    """Return a vector from chunks, in memory that a device reads by itself if it is `pinned`.

    They are copied one after another, so that no other thread waits for all of a large one.
    """
    count, rest = divmod(sum(len(chunk) for chunk in chunks), dtype.itemsize)
    if rest:
        raise ValueError("the chunks do not hold whole numbers")
    flat = torch.empty(count, dtype=dtype, pin_memory=pinned)
    decode_into(flat, chunks)
    return flat


def whole_of(chunks: Sequence[Bytes], dtype: torch.dtype) -> Tensor:
    """The same for chunks that nobody changes: one that came in one piece is not copied."""
    views = [memoryview(chunk) for chunk in chunks]
    if len(views) != 1 or views[0].readonly or not len(views[0]) or len(views[0]) % dtype.itemsize:
        return decode_flat(chunks, dtype)
    return torch.frombuffer(views[0], dtype=dtype)


def file_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> tuple[Bytes, ...]:
    """Return a safetensors file of float32 and uint8 CPU tensors in pieces: its header, then views of the tensors.

    The tensors must not change any more. https://huggingface.co/docs/safetensors: 8 bytes of length, JSON padded to a multiple of 8, the
    tensors one after another.
    """
    return header_of(tensors, metadata), *bodies_of(tensors)


def bodies_of(tensors: Mapping[str, Tensor], look: Callable[[str, Tensor], None] = lambda _name, _tensor: None) -> Iterator[memoryview]:
    """Yield what follows the header, tensor by tensor. One of another device is copied to the machine's memory for as long.

    `look` is called with each tensor before it is given, when it is in the machine's memory. Another thread may put a copy in a device's
    tensor's place and change the tensor after that: then the copy is taken.
    """
    for name in _in_order(tensors):
        found = tensors[name]
        tensor = found.detach().cpu().contiguous()
        if found.device.type != "cpu" and tensors[name] is not found:
            tensor = tensors[name].detach().cpu().contiguous()
        del found
        if tensor.numel():
            look(name, tensor)
            yield memory_of(tensor)
        del tensor


def file_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of a file of such tensors, which may be on the meta device, without metadata. With fewer or smaller ones it is no larger."""
    return len(header_of(tensors)) + sum(tensor.nbytes for tensor in tensors.values())


def _in_order(tensors: Mapping[str, Tensor]) -> list[str]:
    """Their names in order, those of several bytes a number first: so all of them are aligned. No two are read from a disk at once."""
    return sorted(tensors, key=lambda name: (tensors[name].dtype is torch.uint8, name))


def header_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the header of a file of such tensors, which may be on the meta device."""
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in _in_order(tensors):
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {"dtype": _FILE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
        del tensor  # one may be read from a disk for this alone: two large ones are not in memory at once
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensors_of_file(data: bytearray | memoryview) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file of float32 and uint8, as views of `data`: nothing is copied.

    Raises ValueError unless the header describes the whole of it, one tensor after another. Any header ends in that or in tensors.
    """
    start = header_end(bytes(data[:8]), len(data))
    found = dict[str, Tensor]()
    for name, (shape, dtype, begin) in places_in_file(bytes(data[8:start]), len(data)).items():
        count = math.prod(shape)
        flat = torch.frombuffer(data, dtype=dtype, count=count, offset=begin) if count else torch.empty(0, dtype=dtype)
        found[name] = flat.view(shape)
    return found


def header_end(first: bytes, num_bytes: int) -> int:
    """Return where the tensors begin in a safetensors file of so many bytes, from its `first` eight. Raises ValueError."""
    start = 8 + int.from_bytes(first, "little")
    if num_bytes < 8 or start > num_bytes or start % _ALIGNMENT:
        raise ValueError("its header is not of the length that it says")
    return start


def places_in_file(text: bytes, num_bytes: int) -> dict[str, tuple[list[int], torch.dtype, int]]:
    """Return shape, type and first byte of each tensor in a safetensors file, from its header's text. Raises ValueError."""
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("its header is no object")
    header.pop("__metadata__", None)
    start = 8 + len(text)
    found, end = dict[str, tuple[list[int], torch.dtype, int]](), 0
    for name, told in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        shape, (begin, end_told) = told["shape"], told["data_offsets"]
        dtype = _FILE_DTYPES.get(str(told["dtype"]))
        if dtype is None:
            raise ValueError(f"it holds tensors of {str(told['dtype'])[:20]}")
        if not all(type(size) is int and size >= 0 for size in shape) or begin != end or begin % dtype.itemsize:
            raise ValueError("its tensors do not follow one another")
        count = math.prod(shape)
        if end_told != begin + dtype.itemsize * count:
            raise ValueError("its tensors do not follow one another")
        end = end_told
        found[name] = shape, dtype, start + begin
    if start + end != num_bytes:
        raise ValueError("its tensors are not all that it holds")
    return found


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
