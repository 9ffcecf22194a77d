"""Where a state lies that is downloaded or copied: in a file without a name, so that it takes no memory beside the stage's own tensors.

A small state lies in memory, and so does one that the disk, or the owner's limit for it, has no room for.
"""

from __future__ import annotations

import errno
import itertools
import os
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import structlog
from torch import Tensor

from peerd.link.links import Bytes
from peerd.stage.blocks import memory
from peerd.stage.disk_room import DiskRoom
from peerd.stage.state_file import CutStored, FileTensors, OpenFile
from peerd.wire.chunks import CutFile
from peerd.wire.tensors import bodies_of, file_bytes, header_of, tensors_of_file

LEAST_BYTES = 16 << 20
"""A smaller state lies in memory."""
LOG = structlog.get_logger()


class Spools:
    """Makes files without names in a folder. Without a folder everything lies in memory. Any thread may ask."""

    def __init__(self, folder: Path | None = None, room: DiskRoom | None = None, least_bytes: int = LEAST_BYTES) -> None:
        self._folder = folder
        self._room = room
        self._least_bytes = least_bytes

    def file(self, num_bytes: int) -> OpenFile | None:
        """A new file with room for so many bytes, which counts for the owner's limit while it is open. None where memory has to do."""
        if self._folder is None or num_bytes < self._least_bytes:
            return None
        if self._room is not None and not self._room.has_room_for(num_bytes):
            LOG.info("the owner's limit has no room for a copy of a state: it lies in memory", num_bytes=num_bytes)
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            descriptor, path = tempfile.mkstemp(dir=self._folder)
            Path(path).unlink()
            found = OpenFile(descriptor, _close_apart)
            _reserve(descriptor, num_bytes)
        except OSError as error:
            LOG.warning("the disk has no room for a copy of a state: it lies in memory", num_bytes=num_bytes, error=str(error))
            return None
        if self._room is not None:
            weakref.finalize(found, self._room.promise(num_bytes))
        return found


def _close_apart(descriptor: int) -> None:
    """Close a file that is gone then. The system frees its blocks, which takes a while, and it may be the event loop that lets go of it."""
    threading.Thread(target=os.close, args=(descriptor,), name="close").start()


def _reserve(descriptor: int, num_bytes: int) -> None:
    """Take the room now: a disk that fills up later must not break a download. Raises OSError."""
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)
    except AttributeError:  # not on every system
        os.truncate(descriptor, num_bytes)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        os.truncate(descriptor, num_bytes)


class Landing:
    """Takes the bytes of one safetensors file, in any order and from any thread."""

    def __init__(self, num_bytes: int, spools: Spools) -> None:
        self.num_bytes = num_bytes
        self._spools = spools
        self._guard = threading.Lock()
        self._file: OpenFile | None = None
        self._memory: memoryview | None = None

    def write(self, start: int, data: Bytes) -> None:
        """Raises OSError."""
        with self._guard:
            if self._file is None and self._memory is None:
                self._file = self._spools.file(self.num_bytes)
                if self._file is None:  # pages that nothing was written to take no memory, and nobody waits until they are zero
                    self._memory = memory(self.num_bytes)
        if self._memory is not None:
            self._memory[start : start + len(data)] = data
        elif self._file is not None:
            self._file.write(start, data)

    def tensors(self) -> Mapping[str, Tensor]:
        """What was written. Raises ValueError, among others, if it is no such file, and OSError."""
        if self._memory is not None:
            return tensors_of_file(self._memory)
        return FileTensors(self._file, self.num_bytes) if self._file is not None else {}


class StoredState(Mapping[str, Tensor]):
    """A copy of a state in a file, as it travels: a safetensors file, and another with the previous parameters, if there are any.

    Each tensor is read anew whenever it is asked for.
    """

    def __init__(self, file: OpenFile, tensors: Mapping[str, Tensor]) -> None:
        """Writes the tensors, one at a time. Raises OSError."""
        main, previous = split_off_previous(tensors)
        at = 0
        for part in (main, previous) if previous else (main,):
            pieces: Iterable[Bytes] = itertools.chain([header_of(part)], bodies_of(part))
            for piece in pieces:
                file.write(at, piece)
                at += len(piece)
        self.file = file
        self.num_bytes = at
        self.previous_bytes = file_bytes(previous) if previous else 0
        self._parts = [FileTensors(file, at - self.previous_bytes)]
        if previous:
            self._parts.append(FileTensors(file, self.previous_bytes, at - self.previous_bytes))

    def __getitem__(self, name: str) -> Tensor:
        return next(part for part in self._parts if name in part)[name]

    def __contains__(self, name: object) -> bool:
        return any(name in part for part in self._parts)

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(*self._parts)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def cut(self) -> CutFile:
        return CutStored(self.file, self.num_bytes)


class _Some(Mapping[str, Tensor]):
    """Some of a state's tensors, as they are when they are asked for."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def split_off_previous(tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """A state's tensors without the previous parameters, and these: a joiner hardly ever needs them, so they come last."""
    names: tuple[list[str], list[str]] = [], []
    for name in tensors:
        names[name.startswith("previous/")].append(name)
    return _Some(tensors, names[False]), _Some(tensors, names[True])


def stored_bytes(tensors: Mapping[str, Tensor]) -> int:
    """The size of a `StoredState` of these tensors."""
    main, previous = split_off_previous(tensors)
    return file_bytes(main) + (file_bytes(previous) if previous else 0)
