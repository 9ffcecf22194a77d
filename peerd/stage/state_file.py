"""A state on disk: written from tensors where they are, and read one tensor at a time, so that none is held twice."""

from __future__ import annotations

import contextlib
import json
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from blake3 import blake3
from torch import Tensor

from peerd.link.links import Bytes
from peerd.stage.blocks import vector
from peerd.wire.chunks import CutFile
from peerd.wire.tensors import header_end, memory_of, places_in_file

READ_BYTES = 4 << 20
"""Read or written at once."""
BEHIND_BYTES = 32 << 20
"""Of a checkpoint that is being written: so much goes on its way to the disk at once."""


class OpenFile:
    """A file that stays open while it is referred to, so that it can be read after it was removed. Methods raise OSError."""

    def __init__(self, descriptor: int, close: Callable[[int], None] = os.close) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, close, descriptor)

    @classmethod
    def at(cls, path: Path) -> OpenFile:
        return cls(os.open(path, os.O_RDONLY | os.O_CLOEXEC))

    @property
    def num_bytes(self) -> int:
        return os.fstat(self._descriptor).st_size

    def read_into(self, start: int, target: memoryview) -> None:
        while target:
            count = os.preadv(self._descriptor, [target[:READ_BYTES]], start)
            if not count:
                raise OSError("the file has been cut short")
            target, start = target[count:], start + count

    def read(self, start: int, num_bytes: int) -> bytes:
        """So many bytes, a few megabytes at most: one call."""
        found = os.pread(self._descriptor, num_bytes, start)
        if len(found) != num_bytes:
            raise OSError("the file has been cut short")
        return found

    def write(self, start: int, data: Bytes) -> None:
        left = memoryview(data)
        while left:
            count = os.pwrite(self._descriptor, left[:READ_BYTES], start)
            left, start = left[count:], start + count


class CutStored(CutFile):
    """An open file, cut into chunks. Each is read when it is asked for. Raises OSError."""

    def __init__(self, file: OpenFile, num_bytes: int | None = None, chunk_bytes: int | None = None, *, is_fresh: bool = False) -> None:
        """`num_bytes`: that many of the file; by default all. `is_fresh`: written lately, so that the system still has it in memory."""
        super().__init__((), file.num_bytes if num_bytes is None else num_bytes, chunk_bytes)
        self.is_stored = not is_fresh
        self._open = file

    def _read(self, start: int, num_bytes: int) -> bytes:
        return self._open.read(start, num_bytes)


class FileTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file. Each is read anew whenever it is asked for, and belongs to the caller.

    Raises OSError, and ValueError if it is no such file.
    """

    def __init__(self, file: OpenFile, num_bytes: int | None = None, start: int = 0) -> None:
        """`num_bytes`: of the safetensors file, which begins at `start` of the open one; by default all of that."""
        self._file = file
        self._start = start
        num_bytes = file.num_bytes if num_bytes is None else num_bytes
        end = header_end(file.read(start, min(8, num_bytes)), num_bytes)
        text = file.read(start + 8, end - 8)
        self._places = places_in_file(text, num_bytes)
        self.metadata: dict[str, str] = json.loads(text).get("__metadata__", {})

    def __getitem__(self, name: str) -> Tensor:
        shape, dtype, at = self._places[name]
        found = vector(math.prod(shape), dtype).view(shape)
        self._file.read_into(self._start + at, memory_of(found))
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def write_hashed(path: Path, pieces: Iterable[Bytes]) -> str:
    """Write the pieces to a new file. Returns the BLAKE3 hash of what was written, hex. Raises OSError."""
    hasher = blake3()

    def hashed() -> Iterator[Bytes]:
        for piece in pieces:
            yield piece
            hasher.update(piece)
            del piece

    write_large(path, hashed())
    return hasher.hexdigest()


def write_large(path: Path, pieces: Iterable[Bytes]) -> None:
    """Write the pieces to a new file. Raises OSError.

    The system begins to put each `BEHIND_BYTES` on the disk as soon as they are written. Otherwise it keeps gigabytes of them in memory,
    and when it has no more, every thread that asks for memory waits for the disk.
    """
    done = sent = 0
    with path.open("wb", buffering=0) as file:
        for piece in pieces:
            left = memoryview(piece)
            while left:
                count = file.write(left[:READ_BYTES])
                left, done = left[count:], done + count
                if done - sent >= BEHIND_BYTES:
                    _free_cache(file.fileno())
                    sent = done
            del piece, left  # before the next is made


def free_cache(path: Path) -> None:
    """Let the system use the memory in which it holds a file that has been written and that nobody reads soon."""
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
        _free_cache(file.fileno())


def _free_cache(descriptor: int) -> None:
    """Free what of a file is on the disk, and begin to write the rest of it there; nobody waits. Systems without such a call go on."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def hash_of(path: Path) -> str:
    """The BLAKE3 hash of a file, hex. It is read piece by piece: a mapped file would count as memory of this process."""
    hasher, buffer = blake3(), bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            hasher.update(memoryview(buffer)[:count])
    return hasher.hexdigest()
