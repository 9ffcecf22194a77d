"""Where the dashboard is served: the port asked for, that of last time, or any; and its token, which stays."""

from __future__ import annotations

import contextlib
import shutil
import socket
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from peerd.cli.demo_process import DemoDaemon, bequeath
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.daemon.answers import Answers
from peerd.daemon.peer import Peer
from peerd.daemon.watching.dashboard import Dashboard, take_place
from peerd.errors import PortTakenError, UsageError
from peerd.observe.entries import Event
from peerd.observe.store import HistoryStore

NO_PEER = cast(Peer, SimpleNamespace(archive=None, past=None))
NO_ANSWERS = cast(Answers, None)


def settings(home: Path, **changes: object) -> Settings:
    return Settings(home=str(home), **changes)  # type: ignore[arg-type]


def test_the_next_daemon_has_the_same_address_and_token(tmp_path: Path) -> None:
    first = take_place(settings(tmp_path), Home(tmp_path))
    first.listener.close()
    second = take_place(settings(tmp_path), Home(tmp_path))
    second.listener.close()
    assert second.address_with_token == first.address_with_token
    assert first.address == f"http://127.0.0.1:{first.port}/"
    assert stat.S_IMODE(Home(tmp_path).dashboard.stat().st_mode) == 0o600


def test_in_a_demo_the_successor_of_a_dead_daemon_has_its_address_token_and_past(tmp_path: Path) -> None:
    """Though the dead one's home goes with it."""
    dead, successor = Home(tmp_path / "0"), Home(tmp_path / "7")
    for home in (dead, successor):
        home.folder.mkdir()
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    first = take_place(settings(dead.folder), dead)
    first.listener.close()
    with contextlib.closing(HistoryStore(dead.history("run"))) as store:
        store.add(events=[Event(time_s=1.0, kind="joined", peer="a", stage=0)])
    with (tmp_path / "log").open("wb") as log, process:
        killed = DemoDaemon(peer=0, stage=0, home=dead, process=process, log=log)
        killed.kill()
    shutil.rmtree(dead.folder)
    bequeath(killed.bequest, successor)
    second = take_place(settings(successor.folder), successor)
    second.listener.close()
    assert second.address_with_token == first.address_with_token
    with contextlib.closing(HistoryStore(successor.history("run"))) as store:
        assert [event.kind for event in store.events()] == ["joined"]
    assert stat.S_IMODE(successor.dashboard.stat().st_mode) == 0o600


def test_where_the_port_of_last_time_is_taken_any_will_do(tmp_path: Path) -> None:
    first = take_place(settings(tmp_path), Home(tmp_path))
    second = take_place(settings(tmp_path), Home(tmp_path))
    assert second.port != first.port
    assert second.token == first.token
    for place in (first, second):
        place.listener.close()


def test_a_port_that_was_asked_for_and_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortTakenError, match=f"port {port}.*--dashboard-port"):
            take_place(settings(tmp_path, dashboard_port=port), Home(tmp_path))


@pytest.mark.parametrize("host", ["nowhere.example", "1.2.3", ""])
def test_a_host_is_an_address(tmp_path: Path, host: str) -> None:
    with pytest.raises(UsageError, match="not an IP address"):
        take_place(settings(tmp_path, dashboard_host=host), Home(tmp_path))


@pytest.mark.parametrize("content", ["", "[]", '{"port": "80", "token": 1}', '{"port": 99999, "token": "x"}', "\x00"])
def test_what_is_broken_on_disk_is_made_anew(tmp_path: Path, content: str) -> None:
    Home(tmp_path).dashboard.write_text(content)
    place = take_place(settings(tmp_path), Home(tmp_path))
    place.listener.close()
    assert len(place.token) == 48


async def test_the_verb_gives_a_code_that_holds_once_where_a_browser_is_to_be_opened(tmp_path: Path) -> None:
    place = take_place(settings(tmp_path), Home(tmp_path))
    place.listener.close()
    dashboard = Dashboard(place, NO_PEER, NO_ANSWERS, None, public=False)
    assert await dashboard.tell({}, print) == {"schema": 1, "address": place.address_with_token}
    told = await dashboard.tell({"open": True}, print)
    assert told["address"] == place.address_with_token
    assert place.token not in told["open"]
    code = told["open"].removeprefix(place.address_with(""))
    assert [dashboard.take_code(code) for _ in range(2)] == [True, False]
    public = Dashboard(place, NO_PEER, NO_ANSWERS, None, public=True)
    assert await public.tell({"open": True}, print) == {"schema": 1, "address": place.address}
