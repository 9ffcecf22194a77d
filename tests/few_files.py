"""A process that may open no more files."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

ROOM = 20


@contextlib.contextmanager
def no_file_left() -> Iterator[None]:
    """Within the block this process can open no file and no socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (held[0] + ROOM, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
