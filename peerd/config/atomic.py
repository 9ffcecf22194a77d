"""Atomic files: a draft is written, then renamed into place, so that a reader sees the old content or all of the new."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peerd.errors import DiskError


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """Yield a new path in `folder` to write to and then `commit`. The folder is created if needed.

    A draft that was not committed is removed at the end of the block. An OSError inside the block becomes a DiskError with a remedy.
    """
    path = folder / f".{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from error


def commit(written: Path, target: Path) -> None:
    """Rename a finished draft to its target. Even after a power cut the target holds its old content or all of the new."""
    with written.open("rb") as stream:
        os.fsync(stream.fileno())
    written.replace(target)


def disk_error(folder: Path, error: OSError) -> DiskError:
    """Turn an OSError from writing to `folder` into a DiskError that says what to do."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"{folder}: the disk is full", "free some space and run the command again")
    if error.errno == errno.EFBIG:
        return DiskError(f"{folder}: the file grew past the size limit of this process", "raise `ulimit -f`")
    return DiskError(f"{error.filename or folder}: {error.strerror or error}", "check the folder and its permissions")
