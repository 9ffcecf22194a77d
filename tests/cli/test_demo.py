"""The demo with paper daemons: it starts and watches them, reports those that die, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from peerd.cli import demo_daemons
from peerd.cli.demo_plan import DemoPlan
from peerd.config.manifest import Manifest, ModelConfig, TrainConfig
from tests.cli.conftest import PAPER_DAEMON, ROOT, Command


@pytest.fixture(autouse=True)
def leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The temporary folder of the demos in this file. Afterwards it must be empty, and no process that knows it may be left."""
    folder = Path(tempfile.mkdtemp(prefix="peerd-t-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield folder
    left = list(folder.iterdir())
    running = processes_with(f"TMPDIR={folder}".encode())
    folder.rmdir()
    assert left == []
    assert running == []


def processes_with(mark: bytes) -> list[int]:
    """Other live processes that have `mark` in their environment."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_it_trains_shows_each_step_and_sums_up(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("")
    done = peerd("demo", "--peers", 4, "--steps", 5)
    assert done.code == 0, done.err
    for step in range(1, 6):
        assert f"step   {step}/5" in done.out
    assert "starting peer 3 (stage 1)" in done.out
    assert "5.0000 -> 1.0000" in done.out
    assert max(map(len, done.out.splitlines())) <= 120


def test_its_daemons_stay_in_its_session_and_hear_no_key_of_its_terminal(paper: Callable[[str], None]) -> None:
    """The scheduler shares cores between sessions: daemons in sessions of their own would keep each other's event loops waiting."""
    paper("")
    manifest = Manifest(name="paper", model=ModelConfig(num_layers=2), train=TrainConfig(num_stages=2))
    plan = DemoPlan(manifest=manifest, num_peers=2, slow={}, kills=(), chaos=None, stand_in_ms=0.0, observed=False)
    with demo_daemons.DemoSwarm(plan, lambda _text: None) as swarm:
        swarm.start()
        pids = [daemon.process.pid for daemon in swarm.daemons]
        assert [(os.getsid(pid), os.getpgid(pid)) for pid in pids] == [(os.getsid(0), pid) for pid in pids]


def test_json_goes_to_stdout_and_progress_to_stderr(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("")
    done = peerd("demo", "--peers", 2, "--steps", 4, "--compute-stand-in", 5, "--json")
    summary = json.loads(done.out)
    assert summary["steps"] == 4
    assert summary["losses"] == [5.0, 2.5, pytest.approx(5 / 3), 1.25]
    assert summary["faults"] == []
    assert "stand-in" in summary["note"]
    assert "step   4/4" in done.err


def test_out_holds_what_a_daemon_exported(peerd: Command, paper: Callable[[str], None], short_home: Path) -> None:
    paper("")
    done = peerd("demo", "--peers", 2, "--steps", 2, "--out", short_home / "o")
    assert done.code == 0, done.err
    assert [entry.name for entry in (short_home / "o").iterdir()] == ["run.toml"]
    assert "fetching stage 0" in done.out


def test_a_killed_peer_is_a_fault_and_the_demo_goes_on(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("")
    done = peerd("demo", "--peers", 4, "--steps", 8, "--kill", "3@2", "--json")
    assert done.code == 0, done.err
    (fault,) = json.loads(done.out)["faults"]
    assert (fault["peer"], fault["stage"], fault["kind"], fault["detail"]) == (3, 1, "kill", "was ended by SIGKILL")


def test_nobody_is_killed_before_all_have_come_to_serve(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("late")
    done = peerd("demo", "--peers", 4, "--steps", 8, "--kill", "3@1")
    assert done.code == 0, done.err
    (told,) = re.findall(r"peer 3 \(stage 1\) was ended by SIGKILL in step (\d+), accumulating", done.out)
    assert int(told) >= 4


def test_a_stage_without_peers_ends_the_demo_with_the_reason(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("die")
    done = peerd("demo", "--peers", 2, "--steps", 50)
    assert done.code == 1
    assert "stage 1 has no living peer left (peer 1 exited with code 10)" in done.err
    assert "peer 1 said: peerd: error: the disk is full" in done.out


def test_a_daemon_that_cannot_start_gives_the_demo_its_error_and_code(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("fail")
    done = peerd("demo", "--peers", 2)
    assert done.code == 7
    assert done.err == "peerd: error: peer 0: port 31337 is taken; choose another --port\n"


def test_a_daemon_that_never_gets_ready_is_not_waited_for(
    peerd: Command, paper: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    paper("deaf")
    monkeypatch.setattr(demo_daemons, "READY_SILENCE_S", 0.5)
    done = peerd("demo", "--peers", 2)
    assert done.code == 12
    assert "no sign of work for 0.5 s" in done.err


def test_daemons_that_ignore_every_request_are_killed(
    peerd: Command, paper: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    paper("stubborn")
    monkeypatch.setattr(demo_daemons, "LEAVE_GRACE_S", 0.3)
    monkeypatch.setattr(demo_daemons, "TERMINATE_GRACE_S", 0.3)
    assert peerd("demo", "--peers", 2, "--steps", 2).code == 0


PAPER_DEMO = f"""
import signal, sys
from peerd.cli import demo_daemons, main
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
demo_daemons.module_command = lambda module, *arguments: [sys.executable, {str(PAPER_DAEMON)!r}, *arguments]
main.main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGHUP, 130), (signal.SIGKILL, -9)])
def test_a_signal_ends_the_demo_and_all_it_started(leaves_nothing_behind: Path, number: signal.Signals, code: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PAPER_DEMO, "demo", "--peers", "3", "--steps", "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        for shown in process.stdout:
            if shown.startswith("step   3/"):
                break
        process.send_signal(number)
        assert process.wait(60) == code
        assert process.stderr.read().strip() == ""
    deadline = time.monotonic() + 10
    while processes_with(f"TMPDIR={leaves_nothing_behind}".encode()) and time.monotonic() < deadline:
        time.sleep(0.05)
    if number == signal.SIGKILL:  # a real daemon removes the demo's folder when it is empty; one of paper does not
        for folder in leaves_nothing_behind.iterdir():
            folder.rmdir()
