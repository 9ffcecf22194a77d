"""Atomic files: a draft is written, then renamed into place, so that a reader sees the old content or all of the new."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from peerd.errors import disk_error

DRAFT_SUFFIX = ".part"
_DRAFTS = f".*{DRAFT_SUFFIX}"
_NAME = re.compile(r"\.(.*)-(\d{1,9})-[0-9a-f]{8}", re.DOTALL)
_UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)
_being_written: set[Path] = set()
"""This process's drafts, of all threads."""


@contextmanager
def draft(folder: Path) -> Iterator[Path]:
    """Yield a new path in `folder` to write to and then `commit`. The folder is created if needed.

    A draft that was not committed is removed at the end of the block, and one that a dead process left is removed at its beginning.
    An OSError inside the block becomes an error with a remedy.
    """
    path = folder / f".{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}{DRAFT_SUFFIX}"
    _being_written.add(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from error
    finally:
        _being_written.discard(path)


def replace_file(target: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a whole file: a reader finds the old content or the new, and a power cut loses neither. Raises DiskError or LimitError."""
    with draft(target.parent) as path:
        path.touch(mode=mode)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        commit(path, target)


def remove_drafts(folder: Path) -> None:
    """Remove all drafts in a folder to which only this process writes, whoever began them; for its start."""
    for path in folder.glob(_DRAFTS):
        if path not in _being_written:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def commit(written: Path, target: Path) -> None:
    """Rename a finished draft to its target, and return once that outlasts a power cut. Until then the target holds its old content."""
    _sync(written)
    written.replace(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:  # some file systems have no fsync for folders
            raise
    finally:
        os.close(descriptor)


def _remove_abandoned(folder: Path) -> None:
    """Remove what processes of this machine that are gone were writing."""
    for path in folder.glob(_DRAFTS):
        name = _NAME.fullmatch(path.stem)
        if name is not None and name[1] == socket.gethostname() and path not in _being_written and not _lives_elsewhere(int(name[2])):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def _lives_elsewhere(process: int) -> bool:
    """Whether this is the id of another process. After a restart in a container a process may have the id of an earlier one."""
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # another user's
    return True
