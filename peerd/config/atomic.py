"""Files that are whole or absent: write a draft, then rename it into place."""

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
    """A fresh path in `folder` (created if need be) to write to and then `commit`; gone at the block's end if it was not.

    An OSError inside the block becomes a DiskError that says what to do.
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
    """Give a finished draft its name; after a power cut too the target holds either its old content or all of the new."""
    with written.open("rb") as stream:
        os.fsync(stream.fileno())
    written.replace(target)


def disk_error(folder: Path, error: OSError) -> DiskError:
    """What an OSError while writing to `folder` means to its reader."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"{folder}: the disk is full", "free some space and run the command again")
    if error.errno == errno.EFBIG:
        return DiskError(f"{folder}: the file grew past the size limit of this process", "raise `ulimit -f`")
    return DiskError(f"{error.filename or folder}: {error.strerror or error}", "check the folder and its permissions")
