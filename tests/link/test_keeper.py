"""The keeper: what it keeps dies with whoever started it, and the folders it was told of go with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peerd.link import keeper

KEPT = [sys.executable, "-S", "-c", "import sys, time; print('kept', flush=True); time.sleep(600)"]
GONE_WITHIN_S = 10.0


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """Two to remove, one of them within the other's parent, and that parent to prune."""
    run, home = tmp_path / "homes" / "run", tmp_path / "homes" / "home"
    for folder in (run, home):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    return {"run": run, "home": home, "parent": tmp_path / "homes"}


def start_keeper(folders: dict[str, Path], kept: list[str], parent: list[str] | None = None) -> subprocess.Popen[bytes]:
    order = {"command": kept, "remove": [str(folders["run"]), str(folders["home"])], "prune": [str(folders["parent"])]}
    command = [sys.executable, "-I", "-S", str(Path(keeper.__file__)), json.dumps(order)]
    return subprocess.Popen([*(parent or []), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)


@pytest.fixture
def kept(folders: dict[str, Path]) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A keeper and the process that it keeps."""
    process = start_keeper(folders, KEPT)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"kept\n"
        (child,) = children_of(process.pid)
        yield process, child
        process.kill()


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_gone(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def soon(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + GONE_WITHIN_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def test_when_the_daemon_is_gone_the_kept_process_and_the_folders_go(
    folders: dict[str, Path], kept: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, child = kept
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(GONE_WITHIN_S) == 0
    assert is_gone(child)
    assert not folders["parent"].exists()


def test_a_folder_to_prune_stays_while_something_else_lies_in_it(
    folders: dict[str, Path], kept: tuple[subprocess.Popen[bytes], int]
) -> None:
    (folders["parent"] / "other").touch()
    process, _ = kept
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(GONE_WITHIN_S) == 0
    assert [entry.name for entry in folders["parent"].iterdir()] == ["other"]


def test_the_kept_process_dies_with_a_keeper_that_is_killed(kept: tuple[subprocess.Popen[bytes], int]) -> None:
    process, child = kept
    process.kill()
    process.wait()
    assert soon(lambda: is_gone(child))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_meant_for_the_daemon_do_not_end_it(kept: tuple[subprocess.Popen[bytes], int], number: signal.Signals) -> None:
    process, child = kept
    process.send_signal(number)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert not is_gone(child)


def test_it_ends_when_the_kept_process_ends_and_leaves_the_folders_to_the_daemon(
    folders: dict[str, Path], kept: tuple[subprocess.Popen[bytes], int]
) -> None:
    process, child = kept
    os.kill(child, signal.SIGKILL)
    assert process.wait(GONE_WITHIN_S) != 0
    assert folders["run"].exists()


def test_a_byte_from_the_daemon_ends_the_kept_process_alone(folders: dict[str, Path], kept: tuple[subprocess.Popen[bytes], int]) -> None:
    process, child = kept
    assert process.stdin is not None
    process.stdin.write(b"x")
    process.stdin.flush()
    assert process.wait(GONE_WITHIN_S) != 0
    assert is_gone(child)
    assert folders["run"].exists()


def test_a_daemon_that_is_killed_takes_everything_with_it(folders: dict[str, Path]) -> None:
    """The daemon here is a process that starts a keeper, and dies without a word."""
    order = {"command": KEPT, "remove": [str(folders["run"]), str(folders["home"])], "prune": [str(folders["parent"])]}
    daemon_code = (
        "import subprocess, sys, time\n"
        "keeper = subprocess.Popen([sys.executable, '-I', '-S', *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "print(keeper.stdout.readline().decode().strip(), keeper.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", daemon_code, str(Path(keeper.__file__)), json.dumps(order)], stdout=subprocess.PIPE, text=True
    ) as daemon:
        assert daemon.stdout is not None
        word, _, pid = daemon.stdout.readline().strip().partition(" ")
        assert word == "kept"
        (child,) = children_of(int(pid))
        daemon.kill()
    assert soon(lambda: is_gone(child))
    assert soon(lambda: is_gone(int(pid)))
    assert soon(lambda: not folders["parent"].exists())


def test_the_folders_go_where_the_kept_process_notices_first_that_the_daemon_is_gone(folders: dict[str, Path]) -> None:
    """It ends by itself when it writes where nobody reads any more."""
    code = "import signal, time; signal.signal(signal.SIGPIPE, signal.SIG_DFL)\nwhile True: print('kept', flush=True); time.sleep(0.001)"
    with start_keeper(folders, [sys.executable, "-S", "-c", code]) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == b"kept\n"
        (child,) = children_of(process.pid)
        process.stdout.close()
        assert soon(lambda: is_gone(child))
        process.stdin.close()
        assert soon(lambda: not folders["run"].exists() and not folders["parent"].exists())
