"""The client's side of the control socket, with daemons that answer correctly, incorrectly or not at all."""

from __future__ import annotations

import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from peerd.config.paths import Home
from peerd.control.client import ControlClient
from peerd.control.protocol import MAX_LINE_BYTES
from peerd.errors import NoDaemonError, PeerdError, PortTakenError, TimedOutError
from peerd.swarm.identity import lock_home
from tests.control.fake_daemon import answering, line


@pytest.fixture
def home() -> Iterator[Home]:
    folder = Path(tempfile.mkdtemp(prefix="peerd-t-"))
    yield Home(folder)
    shutil.rmtree(folder, ignore_errors=True)


def test_a_request_carries_its_verb_and_arguments_and_returns_what_ok_holds(home: Home) -> None:
    with answering(home, line({"ok": {"schema": 1, "step": 7}})) as requests:
        reply = ControlClient(home).request("wait", step=7, timeout_s=3)
    assert reply == {"schema": 1, "step": 7}
    assert requests == [{"verb": "wait", "step": 7, "timeout_s": 3}]


def test_progress_lines_are_handed_on_in_order_before_the_reply(home: Home) -> None:
    told: list[str] = []
    with answering(
        home, line({"progress": "one"}) + line({"progress": "two"})[:5], line({"progress": "two"})[5:], line({"ok": {"schema": 1}})
    ):
        ControlClient(home).request("export", on_progress=told.append)
    assert told == ["one", "two"]


def test_a_progress_line_that_repeats_the_last_one_is_not_handed_on(home: Home) -> None:
    told: list[str] = []
    lines = b"".join(line({"progress": text}) for text in ("one", "one", "two", "two", "one"))
    with answering(home, lines + line({"ok": {"schema": 1}})):
        ControlClient(home).request("export", on_progress=told.append)
    assert told == ["one", "two", "one"]


def test_an_error_reply_is_raised_as_the_error_it_names(home: Home) -> None:
    with (
        answering(home, line({"error": {"exit_code": 7, "message": "port 1 is taken", "remedy": "choose another"}})),
        pytest.raises(PortTakenError, match="port 1 is taken; choose another"),
    ):
        ControlClient(home).request("status")


def test_an_error_reply_with_an_unknown_code_is_still_told(home: Home) -> None:
    with (
        answering(home, line({"error": {"exit_code": 99, "message": "odd", "remedy": ""}})),
        pytest.raises(PeerdError, match="odd"),
    ):
        ControlClient(home).request("status")


def test_no_socket_means_no_daemon_and_says_what_to_run(home: Home) -> None:
    with pytest.raises(NoDaemonError, match=r"no peerd daemon runs from .*peerd join"):
        ControlClient(home).request("status")


def test_a_home_that_is_held_and_has_no_socket_belongs_to_a_daemon_that_starts_or_ends(home: Home) -> None:
    lock = lock_home(home)
    for _ in range(3):  # looking does not take the lock
        with pytest.raises(NoDaemonError, match="is starting or ending"):
            ControlClient(home).request("status")
    lock.release()
    with pytest.raises(NoDaemonError, match="no peerd daemon runs"):
        ControlClient(home).request("status")


def test_the_end_of_a_daemon_is_that_it_gives_its_lock_back(home: Home) -> None:
    client = ControlClient(home)
    assert client.wait_for_end(0.0), "none runs"
    lock = lock_home(home)
    assert not client.wait_for_end(0.1)
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(client.wait_for_end, 10.0)
        lock.release()
        assert ended.result()


def test_a_socket_left_behind_means_that_the_daemon_is_gone(home: Home) -> None:
    home.run_folder.mkdir(parents=True, mode=0o700)  # as a daemon makes it: the next one sweeps it away
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(home.control_socket))
    with pytest.raises(NoDaemonError, match="left its socket behind"):
        ControlClient(home).request("status")


def test_a_silent_daemon_costs_no_more_than_the_deadline(home: Home) -> None:
    began = time.monotonic()
    with answering(home, then_hang=True), pytest.raises(TimedOutError, match=r"did not answer `status` within 0\.3 s"):
        ControlClient(home).request("status", silence_s=0.3)
    assert time.monotonic() - began < 3


def test_a_daemon_that_drips_bytes_without_a_line_is_not_waited_for(home: Home) -> None:
    with answering(home, b"{", then_hang=True), pytest.raises(TimedOutError):
        ControlClient(home).request("status", silence_s=0.3)


def test_a_daemon_that_ends_before_it_answers_is_told_as_such(home: Home) -> None:
    with answering(home, line({"progress": "so far"})), pytest.raises(NoDaemonError, match="ended before it answered"):
        ControlClient(home).request("export")


BAD_REPLIES = [
    b"not json\n",
    b"[1]\n",
    b'{"what": 1}\n',
    b'{"ok": 3}\n',
    b'{"error": {"exit_code": "x"}}\n',
    b"\xff\xfe\n",
    b"[" * 100_000 + b"\n",
]


@pytest.mark.parametrize("bad", BAD_REPLIES, ids=range(len(BAD_REPLIES)))
def test_a_reply_that_breaks_the_protocol_is_one_clear_error(home: Home, bad: bytes) -> None:
    with answering(home, bad), pytest.raises(PeerdError, match="cannot be understood"):
        ControlClient(home).request("status")


def test_a_reply_of_another_schema_is_refused(home: Home) -> None:
    with answering(home, line({"ok": {"schema": 2}})), pytest.raises(PeerdError, match="schema 2, this client 1"):
        ControlClient(home).request("status")


def test_a_reply_without_end_is_refused_before_it_fills_the_memory(home: Home) -> None:
    with answering(home, b"x" * (MAX_LINE_BYTES + 70_000)), pytest.raises(PeerdError, match="longer than"):
        ControlClient(home).request("status")
