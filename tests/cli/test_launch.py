"""Starting daemons: detached, and in place of this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peerd.cli import launch
from peerd.config.settings import Settings
from tests.cli.conftest import Command


@pytest.fixture
def run_folder(peerd: Command, short_home: Path) -> Path:
    assert peerd("new", short_home / "r", "--steps", 1000, "--name", "mine").code == 0
    return short_home / "r"


@contextlib.contextmanager
def ended_afterwards(pid: int) -> Iterator[None]:
    """Send SIGTERM to a detached daemon and wait until it has ended."""
    try:
        yield
    finally:
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 10
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline:
                time.sleep(0.02)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # that it goes on is the point
def test_detached_prints_the_line_to_join_and_the_daemon_goes_on(peerd: Command, paper: Callable[[str], None], run_folder: Path) -> None:
    paper("")
    done = peerd("start", run_folder, "--detach", "--json")
    assert done.code == 0, done.err
    ready = json.loads(done.out)
    with ended_afterwards(ready["pid"]):
        assert ready["schema"] == 1
        assert ready["join"].endswith("#run-1000")
        assert json.loads(peerd("status", "--json").out)["pid"] == ready["pid"]
        assert peerd("wait", "--serving", "--timeout", 5).code == 0
        assert peerd("leave", "--now").code == 0


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_detached_for_people_is_one_line_to_paste(peerd: Command, paper: Callable[[str], None], short_home: Path) -> None:
    paper("")
    done = peerd("join", "address-7", "--detach")
    with ended_afterwards(json.loads(peerd("status", "--json").out)["pid"]):
        assert done.out.startswith("peerd join /ip4/")
        assert done.out.count("\n") == 1
        assert str(short_home / "daemon.log") in done.err


def test_a_detached_daemon_that_fails_gives_its_error_and_code(peerd: Command, paper: Callable[[str], None], run_folder: Path) -> None:
    paper("fail")
    done = peerd("start", run_folder, "--detach")
    assert done.code == 7
    assert done.err == "peerd: error: port 31337 is taken; choose another --port\n"


def test_a_detached_daemon_that_stays_silent_is_ended(
    peerd: Command, paper: Callable[[str], None], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper("deaf")
    monkeypatch.setattr(launch, "READY_TIMEOUT_S", 0.5)
    assert peerd("start", run_folder, "--detach").code == 12


def test_in_the_foreground_the_command_becomes_the_daemon(
    peerd: Command, run_folder: Path, short_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []

    def become(_path: str, command: list[str]) -> None:
        became.append(command)
        raise SystemExit(0)  # execv does not come back

    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setenv("PEERD_READY", "")
    with pytest.raises(SystemExit):
        peerd("start", run_folder, "--port", 4000, "--stage", 1, "--slow", 2)
    (command,) = became
    assert command[1:4] == ["-P", "-m", "peerd.daemon"]
    settings = Settings.from_json(command[4])
    expected = Settings(
        home=str(short_home), run_file=str(run_folder / "run.toml"), host="127.0.0.1", port=4000, stage=1, stay=True, slow_factor=2.0
    )
    assert settings == expected
    assert os.environ["PEERD_READY"] == "text"


def test_an_exit_status_is_told_in_words() -> None:
    assert launch.describe_exit(3) == "exited with code 3"
    assert launch.describe_exit(-9) == "was ended by SIGKILL"
    assert launch.describe_exit(-200) == "was ended by signal 200"
