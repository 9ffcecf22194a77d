"""The folder of a daemon's sockets: one daemon at a time claims it, and it is removed once its daemon is gone.

A claim is a lock on the folder itself, which the kernel releases when the daemon ends, however it ends. A folder is
stale when no process holds that lock and no socket in it accepts a connection. Its age is no criterion, and neither is
whether its home still exists: a new daemon of that home makes its own folder.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peerd.config import paths
from peerd.errors import DiskError, disk_error

CLAIM_TIMEOUT_S = 5.0
_LOOK_AGAIN_S = 0.01
_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ENOENT, errno.EPROTOTYPE)


@dataclass(slots=True)
class RunFolder:
    """A claimed folder. The claim ends with `release` or with this process."""

    path: Path
    _descriptor: int

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def claim(folder: Path) -> RunFolder:
    """Claim a folder that only this user can enter, and empty it. Raises DiskError if another user owns it or another process holds it.

    The caller holds the home's lock, so all that lies in the folder was left by a daemon that could not clean up.
    """
    deadline_s = time.monotonic() + CLAIM_TIMEOUT_S
    try:
        while (descriptor := _claimed(folder)) is None:
            if time.monotonic() > deadline_s:
                raise DiskError(f"{folder} is held by another process", "end the peerd that uses it, or choose another --home")
            time.sleep(_LOOK_AGAIN_S)  # another daemon may be removing it
        try:
            for leftover in folder.iterdir():
                leftover.unlink()
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise disk_error(folder, error, "choose a folder you can write to with --home") from None
    return RunFolder(folder, descriptor)


def _claimed(folder: Path) -> int | None:
    """Return the folder's descriptor, locked; None if another process holds it or has just removed it."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except FileExistsError:
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise
        return None
    try:
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            raise DiskError(f"{folder} belongs to another user", "remove it or choose another --home")
        descriptor = os.open(folder, _OPEN)
    except FileNotFoundError:
        return None
    if _lock(descriptor) and _is_at(descriptor, folder):
        os.fchmod(descriptor, 0o700)
        return descriptor
    os.close(descriptor)
    return None


def stale_folders() -> Iterator[Path]:
    """Yield this user's run folders outside homes that were left by daemons that are gone."""
    for folder in paths.short_run_folders():
        descriptor = _opened_if_stale(folder)
        if descriptor is not None:
            os.close(descriptor)
            yield folder


def sweep() -> list[Path]:
    """Remove the stale folders and return them. Takes milliseconds and never waits; a folder that cannot be removed stays."""
    return [folder for folder in paths.short_run_folders() if _remove_if_stale(folder)]


def _remove_if_stale(folder: Path) -> bool:
    descriptor = _opened_if_stale(folder)
    if descriptor is None:
        return False
    try:
        for name in os.listdir(descriptor):  # noqa: PTH208 - lists the opened folder, even if the path now names another
            os.unlink(name, dir_fd=descriptor)  # raises for a subfolder, which peerd did not make
        folder.rmdir()
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _opened_if_stale(folder: Path) -> int | None:
    """Return the folder's descriptor, locked, if only this user can enter it and no daemon uses it; otherwise None."""
    try:
        descriptor = os.open(folder, _OPEN)
    except OSError:
        return None
    info = os.fstat(descriptor)
    is_ours = info.st_uid == os.getuid() and stat.S_IMODE(info.st_mode) == 0o700
    if is_ours and _lock(descriptor) and _is_at(descriptor, folder) and not is_listened_to(folder):
        return descriptor
    os.close(descriptor)
    return None


def is_listened_to(folder: Path) -> bool:
    """Return whether a socket in the folder accepts connections. Anything but a plain refusal counts as yes."""
    for entry in folder.iterdir():
        if entry.is_symlink() or not entry.is_socket():
            continue
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            if probe.connect_ex(str(entry)) not in _NOBODY_LISTENS:
                return True
    return False


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks: only the sockets are checked
    return True


def _is_at(descriptor: int, folder: Path) -> bool:
    """Return whether the path still names the opened folder."""
    try:
        there = folder.lstat()
    except OSError:
        return False
    here = os.fstat(descriptor)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
