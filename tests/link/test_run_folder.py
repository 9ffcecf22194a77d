"""Folders of sockets: those of daemons that are gone are swept away, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from peerd.config import paths
from peerd.config.paths import Home
from peerd.errors import DiskError
from peerd.link import run_folder

LONG = "h" * 100
CLAIM = """
import socket, sys, time
from pathlib import Path
from peerd.link.run_folder import claim
folder = Path(sys.argv[1])
claimed = claim(folder)
listeners = []
for name in sys.argv[2:]:
    listeners.append(socket.socket(socket.AF_UNIX))
    listeners[-1].bind(str(folder / name))
    listeners[-1].listen()
print("claimed", flush=True)
time.sleep(600)
"""


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What stands in for /tmp: other daemons of this user are none of the test's business."""
    folder = Path(tempfile.mkdtemp(prefix="peerd-t-", dir="/tmp"))
    monkeypatch.setattr(paths, "SHORT_PARENT", folder)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def folder(parent: Path) -> Path:
    return Home(Path("/") / LONG).run_folder


def daemon_in(folder: Path, *sockets: str) -> subprocess.Popen[str]:
    """A process that has claimed the folder and listens on sockets in it."""
    process = subprocess.Popen([sys.executable, "-c", CLAIM, str(folder), *sockets], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "claimed\n"
    return process


def leave_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))


def test_the_folder_of_a_killed_daemon_is_swept_and_that_of_a_live_one_stays(folder: Path) -> None:
    with daemon_in(folder, "control.sock", "grpc.sock") as daemon:
        assert list(run_folder.stale_folders()) == []
        assert run_folder.sweep() == []
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
        assert list(run_folder.stale_folders()) == [folder]
        assert (folder / "control.sock").is_socket()
        assert run_folder.sweep() == [folder]
    assert not folder.exists()


def test_a_daemon_that_has_no_socket_yet_keeps_its_folder(folder: Path) -> None:
    with daemon_in(folder) as daemon:
        assert run_folder.sweep() == []
        daemon.kill()


def test_a_daemon_without_a_lock_keeps_its_folder_while_a_socket_answers(folder: Path) -> None:
    """As one of an earlier version does, or one that is just moving to another stage."""
    folder.mkdir(mode=0o700)
    leave_socket(folder / "p2pd.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "control.sock"))
        listener.listen(0)
        for _ in range(3):  # the last finds the queue full, which is no sign of being gone
            assert run_folder.sweep() == []
    assert run_folder.sweep() == [folder]


def test_what_is_not_this_users_alone_is_left(folder: Path, parent: Path) -> None:
    folder.mkdir(mode=0o755)
    elsewhere = parent / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    leave_socket(elsewhere / "a.sock")
    link = folder.with_name(folder.name[:-1] + ("0" if folder.name[-1] != "0" else "1"))
    link.symlink_to(elsewhere)
    other = parent / "peerd-demo-x"
    other.mkdir(mode=0o700)
    assert run_folder.sweep() == []
    assert (elsewhere / "a.sock").exists()
    assert folder.exists()
    assert other.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_left_and_not_claimed(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    assert run_folder.sweep() == []
    with pytest.raises(DiskError, match="another user"):
        run_folder.claim(folder)


def test_a_folder_with_something_else_in_it_stays(folder: Path) -> None:
    (folder / "inner").mkdir(parents=True, mode=0o700)
    folder.chmod(0o700)
    assert run_folder.sweep() == []
    assert (folder / "inner").exists()


def test_a_claimed_folder_holds_nothing_old(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    for name in ("control.sock", "p2pd.sock"):
        leave_socket(folder / name)
    claimed = run_folder.claim(folder)
    assert list(folder.iterdir()) == []
    assert folder.stat().st_mode & 0o777 == 0o700
    claimed.release()
    claimed.release()
    run_folder.claim(folder).release()


def test_who_starts_while_the_folder_is_being_swept_gets_a_fresh_one(folder: Path) -> None:
    """Many at once: nobody ends with a folder that has been removed under it."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom peerd.config import paths\nfrom peerd.link import run_folder\n"
        "paths.SHORT_PARENT = Path(sys.argv[1]).parent\n"
        "for _ in range(200):\n    run_folder.sweep()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)]) as sweeper:
        while sweeper.poll() is None:
            claimed = run_folder.claim(folder)
            (folder / "new").touch()
            claimed.release()
        assert sweeper.returncode == 0


def test_a_folder_that_cannot_be_made_is_told(parent: Path) -> None:
    (parent / "file").touch()
    with pytest.raises(DiskError, match="--home"):
        run_folder.claim(parent / "file" / "run")
