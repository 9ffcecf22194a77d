"""Starting daemons: detached, and in place of this process."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peerd.cli import launch
from peerd.config.settings import Settings
from peerd.errors import TimedOutError
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
    assert (done.code, done.err) == (0, "")
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
        assert done.err.startswith("peerd: measuring the upload with 2 MB\n"), "what it does until then is told"
        assert " of 2 in run demo\n" in done.err, "which part it has"


def test_a_detached_daemon_that_fails_gives_its_error_and_code(peerd: Command, paper: Callable[[str], None], run_folder: Path) -> None:
    paper("fail")
    done = peerd("start", run_folder, "--detach")
    assert done.code == 7
    assert done.err == "peerd: error: port 31337 is taken; choose another --port\n"


def test_a_detached_daemon_that_stays_silent_is_ended(
    peerd: Command, paper: Callable[[str], None], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paper("deaf")
    monkeypatch.setattr(launch, "READY_SILENCE_S", 0.5)
    assert peerd("start", run_folder, "--detach").code == 12


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
def test_a_detached_daemon_that_works_before_it_is_ready_is_waited_for(
    peerd: Command, paper: Callable[[str], None], run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It makes tokens of gigabytes of text, or hashes checkpoints of gigabytes: nobody knows beforehand how long that takes."""
    paper("slow")
    monkeypatch.setattr(launch, "READY_SILENCE_S", 1.5)
    done = peerd("start", run_folder, "--detach")
    assert done.code == 0
    with ended_afterwards(json.loads(peerd("status", "--json").out)["pid"]):
        assert done.out.startswith("peerd join /ip4/")


def test_processor_time_is_a_sign_of_work_as_well_as_a_longer_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "COMPUTED_S", 0.5)
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            signs = launch.signs_of(busy, lambda: 7)
            before, deadline = signs(), time.monotonic() + 60
            while signs() == before and time.monotonic() < deadline:
                time.sleep(0.1)
            assert signs() != before
        finally:
            busy.kill()
    assert signs() == (7, 0), "it has ended"


def test_a_child_that_computes_is_waited_for_and_one_that_only_waits_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkup hashes checkpoints of gigabytes."""
    monkeypatch.setattr(launch, "COMPUTED_S", 0.1)
    busy = "import time; until = time.monotonic() + 3\nwhile time.monotonic() < until: pass\nprint('{\"done\": 1}')"
    for code, fails in ((busy, False), ("import time; time.sleep(60)", True)):
        monkeypatch.setattr(launch, "module_command", lambda *_told, code=code: [sys.executable, "-c", code])
        if fails:
            with pytest.raises(TimedOutError, match="the checkup has shown no sign of work for 2 s"):
                launch.run_child("x", {}, what="the checkup", silence_s=2.0)
        else:
            assert launch.run_child("x", {}, what="the checkup", silence_s=2.0) == {"done": 1}


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
        home=str(short_home),
        run_file=str(run_folder / "run.toml"),
        host="127.0.0.1",
        port=4000,
        stage=1,
        keeps_stage=True,
        slow_factor=2.0,
        nice=10,
        spares_laptop=True,
    )
    assert settings == expected
    assert os.environ["PEERD_READY"] == "text"


def test_an_exit_status_is_told_in_words() -> None:
    assert launch.describe_exit(3) == "exited with code 3"
    assert launch.describe_exit(-9) == "was ended by SIGKILL"
    assert launch.describe_exit(-200) == "was ended by signal 200"
