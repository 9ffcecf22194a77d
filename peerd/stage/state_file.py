"""A state on disk: written from tensors where they are, and read one tensor at a time, so that none is held twice."""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from peerd.link.links import Bytes
from peerd.wire.tensors import header_end, places_in_file

READ_BYTES = 4 << 20
"""Read at once where a file is hashed."""


class FileTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file. Each is read anew whenever it is asked for, and belongs to the caller.

    The file stays open, so that it can be read after it was removed. Raises OSError, and ValueError if it is no such file.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        num_bytes = os.fstat(self._descriptor).st_size
        start = header_end(os.pread(self._descriptor, 8, 0), num_bytes)
        text = os.pread(self._descriptor, start - 8, 8)
        self._places = places_in_file(text, num_bytes)
        self.metadata: dict[str, str] = json.loads(text).get("__metadata__", {})

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype, at = self._places[name]
        found = torch.empty(shape, dtype=dtype)
        left = memoryview(found.view(-1).numpy().data).cast("B") if found.numel() else memoryview(b"")
        while left:
            count = os.preadv(self._descriptor, [left], at)
            if not count:
                raise OSError("the file has been cut short")
            left, at = left[count:], at + count
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def write_hashed(path: Path, pieces: Iterable[Bytes]) -> str:
    """Write the pieces to a new file. Returns the BLAKE3 hash of what was written, hex. Raises OSError."""
    hasher = blake3()
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                left = left[file.write(left[:READ_BYTES]) :]
            hasher.update(piece)
    return hasher.hexdigest()


def hash_of(path: Path) -> str:
    """The BLAKE3 hash of a file, hex. It is read piece by piece: a mapped file would count as memory of this process."""
    hasher, buffer = blake3(), bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
    return hasher.hexdigest()
