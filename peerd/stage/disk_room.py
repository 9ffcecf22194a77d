"""How much of a disk the files of a run may take together: checkpoints, kept averages, and what is being written."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from peerd.config.atomic import DRAFT_SUFFIX


class DiskRoom:
    """The owner's limit for some folders. Any thread may ask."""

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._guard = threading.Lock()
        self._promised_bytes = 0
        self.quota_bytes = 0
        """The owner's limit for all files in the folders; 0: none."""

    @contextmanager
    def writing(self, num_bytes: int) -> Iterator[None]:
        """A file of this size is being written inside the block. It counts from the beginning, its draft does not count a second time."""
        with self._guard:
            self._promised_bytes += num_bytes
        try:
            yield
        finally:
            with self._guard:
                self._promised_bytes -= num_bytes

    def promise(self, num_bytes: int) -> Callable[[], None]:
        """Count so many bytes of a file without a name, until the result is called."""
        stack = ExitStack()
        stack.enter_context(self.writing(num_bytes))
        return stack.close

    @property
    def is_exceeded(self) -> bool:
        """Whether the files, and those being written, take more than the limit."""
        return not self.has_room_for(0)

    def has_room_for(self, num_bytes: int) -> bool:
        """Whether so many bytes more are within the limit."""
        if not self.quota_bytes:
            return True
        files = [path for folder in self._folders for path in folder.glob("*") if path.suffix != DRAFT_SUFFIX]
        return self._promised_bytes + sum(map(size_of, files)) + num_bytes <= self.quota_bytes


def size_of(path: Path) -> int:
    """The size of a file in bytes; 0 if it is gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
