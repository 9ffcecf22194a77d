"""Several devices under one home: one command starts a daemon for each, and the other verbs speak with all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peerd.cli import devices, organise, supervise
from peerd.config.device_homes import DeviceHomes, note_devices
from peerd.config.limits import load_wishes
from peerd.config.paths import Home
from peerd.control.client import ControlClient
from peerd.errors import PeerdError
from tests.cli.conftest import Command
from tests.cli.replies import peers_reply, status_reply
from tests.control.fake_daemon import answering, line

BOTH = "cuda:0,cuda:1"
pytestmark = pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # that daemons go on is the point


def runs(home: Home) -> bool:
    return home.control_socket.exists()


def wait_until(seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not seen() and time.monotonic() < deadline:
        time.sleep(0.02)


@pytest.fixture
def both(short_home: Path) -> Iterator[tuple[Home, ...]]:
    """The homes of the two devices. Daemons in the background, which are this process's children, are ended and waited for."""
    homes = DeviceHomes(Home(short_home), ("cuda:0", "cuda:1")).homes
    yield homes
    for home in homes:
        with contextlib.suppress(PeerdError):
            ControlClient(home).request("leave")
    with contextlib.suppress(ChildProcessError):
        wait_until(lambda: os.waitpid(-1, os.WNOHANG) == (0, 0) and False)


def status_of(peerd: Command) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(peerd("status", "--json").out)
    return reply


def test_a_processor_may_have_several_daemons_by_number() -> None:
    devices.check_devices("cpu:0,cpu:1")
    assert devices.devices_of("cpu:0,cpu:1") == ("cpu:0", "cpu:1")
    with pytest.raises(PeerdError, match="cpu:0,cpu:1"):
        devices.check_devices("cpu,cpu")


def test_one_command_starts_a_daemon_for_each_device_and_one_ends_them(
    peerd: Command, paper: Callable[[str], None], both: tuple[Home, ...]
) -> None:
    paper("")
    done = peerd("join", "address-900", "--device", BOTH, "--detach", "--json", "--port", 4000)
    assert done.code == 0, done.err
    began = json.loads(done.out)
    assert [each["device"] for each in began["devices"]] == ["cuda:0", "cuda:1"]
    assert began["pid"] == began["devices"][0]["pid"] != began["devices"][1]["pid"]
    reply = status_of(peerd)
    assert reply["pid"] == began["pid"]
    assert [each["status"]["pid"] for each in reply["devices"]] == [each["pid"] for each in began["devices"]]
    assert reply["devices"][1]["home"] == str(both[1].folder)
    assert peerd("wait", "--serving").code == 0
    told = peerd("status").out
    assert "cuda:0" in told
    assert "cuda:1" in told

    again = peerd("join", "address-900", "--device", BOTH, "--detach")
    assert again.code == 8
    assert "runs from" in again.err
    assert peerd("join", "address-900", "--detach").code == 8
    assert peerd("leave").code == 0
    wait_until(lambda: not any(map(runs, both)))
    assert peerd("status").code == 11


@pytest.mark.usefixtures("both")
def test_a_device_that_fails_keeps_no_other_from_working(peerd: Command, paper: Callable[[str], None]) -> None:
    paper("fail on cuda:1")
    done = peerd("join", "address-900", "--device", BOTH, "--detach", "--json")
    assert done.code == 7
    assert done.err == "peerd: error: cuda:1: port 31337 is taken; choose another --port\n"
    assert [each["device"] for each in json.loads(done.out)["devices"]] == ["cuda:0"]
    here, absent = status_of(peerd)["devices"]
    assert here["status"]["pid"]
    assert absent["status"] is None
    assert "no peerd daemon runs from" in absent["error"]
    assert "cuda:1" in peerd("status").out
    assert peerd("leave").code == 0


def test_if_the_first_fails_none_is_started(peerd: Command, paper: Callable[[str], None], short_home: Path) -> None:
    paper("fail on cuda:0")
    assert peerd("join", "address-900", "--device", BOTH, "--detach").code == 7
    assert not (short_home / "devices").exists()
    assert peerd("join", "address-900", "--device", BOTH).code == 7


@contextlib.contextmanager
def interrupted_once(seen: Callable[[], bool]) -> Iterator[None]:
    """Press Ctrl-C in this process once something is seen."""

    def press() -> None:
        wait_until(seen)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def test_in_the_foreground_the_command_minds_all_of_them_and_ctrl_c_ends_them(
    peerd: Command, paper: Callable[[str], None], both: tuple[Home, ...]
) -> None:
    paper("")
    with interrupted_once(lambda: all(map(runs, both))):
        done = peerd("join", "address-900", "--device", BOTH)
    assert done.code == 0
    assert done.out.startswith("peerd join /ip4/")
    assert not any(map(runs, both))


def test_daemons_that_have_ended_meanwhile_have_nothing_more_to_tell(both: tuple[Home, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C may come between their start and the first look at what they say."""
    organise._tell_more(DeviceHomes(both[0], ("cuda:0", "cuda:1")))
    assert "end with `peerd leave`" in capsys.readouterr().err


def test_in_the_foreground_one_that_fails_is_started_again_while_another_runs(
    peerd: Command, paper: Callable[[str], None], both: tuple[Home, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    paper("crash once on cuda:1")
    monkeypatch.setattr(supervise, "RETRY_S", 0.1)
    with interrupted_once(lambda: runs(both[1])):
        done = peerd("join", "address-900", "--device", BOTH)
    assert done.code == 0
    assert "the daemon of cuda:1 exited with code 10; it is started again in 0.1 s" in done.err
    assert not any(map(runs, both))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ("cuda:0,cuda:0", "a device stands there twice"),
        ("cuda:0,auto", "auto cannot be one of several"),
        ("cuda:0,", "an empty name cannot be one of several"),
        ("all,cpu", "all cannot be one of several"),
        ("gpu", "unknown"),
    ],
)
def test_devices_that_make_no_sense_are_refused(peerd: Command, given: str, reason: str) -> None:
    done = peerd("join", "address-900", "--device", given)
    assert (done.code, reason in done.err) == (2, True), done.err


def test_ports_of_all_devices_must_not_meet(peerd: Command) -> None:
    done = peerd("join", "address-900", "--device", BOTH, "--port", 4000, "--direct-port", 4001)
    assert done.code == 2
    assert "--direct-port 4001: 2 devices take the ports 4001 to 4002" in done.err


def test_where_there_is_no_gpu_all_means_the_processor() -> None:
    assert devices.devices_of("all") == ("cpu",)


def test_without_a_daemon_limits_are_those_of_the_home_of_all(peerd: Command, short_home: Path) -> None:
    homes = DeviceHomes(Home(short_home), ("cuda:0", "cuda:1"))
    note_devices(homes)
    homes.homes[1].folder.mkdir(parents=True)
    assert peerd("--home", homes.homes[1].folder, "limits", "--upload", "20Mbit").code == 0
    assert load_wishes(homes.root).limits.upload == 2.5e6
    assert peerd("pause").code == 0
    assert load_wishes(homes.root).paused


def test_verbs_ask_the_device_that_runs_where_the_first_does_not(peerd: Command, short_home: Path) -> None:
    homes = DeviceHomes(Home(short_home), ("cuda:0", "cuda:1"))
    note_devices(homes)
    with answering(homes.homes[1], line({"ok": peers_reply()})):
        assert json.loads(peerd("peers", "--json").out) == peers_reply()
    with answering(homes.homes[1], line({"ok": status_reply()})):
        reply = status_of(peerd)
    assert {**reply, "devices": []} == {**status_reply(), "devices": []}
    assert [each["status"] for each in reply["devices"]] == [None, status_reply()]
