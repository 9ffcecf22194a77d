"""The screen of `peerd top` with a control socket that answers like a daemon, driven by textual's pilot."""

from __future__ import annotations

import html
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from peerd.cli.top import app as app_module
from peerd.cli.top.app import TopApp
from peerd.cli.top.feed import Feed
from peerd.cli.top.picture import picture_of
from peerd.cli.top.recall import Poll, Recall
from peerd.cli.top.swarm_list import SwarmList
from peerd.config.paths import Home
from peerd.control.client import ControlClient
from peerd.errors import PeerdError
from tests.cli.replies import event_info, owner_info, peer_info, peers_reply, run_info, status_reply
from tests.control.fake_daemon import serving

WITHIN_S = 30.0


class Daemon:
    """The answers of the socket, which a test may change at any time."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = dict(status_reply())
        self.peers: dict[str, Any] = dict(peers_reply())
        self.peers["stages"][0]["peers"][0] = self.status["peer"]
        self.steps = [{"step": step, "loss": 5.0 - step, "tokens": 8192, "time_s": 1000.0 + step} for step in range(3)]
        self.events: list[dict[str, Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.refuses: set[str] = set()

    def answer(self, request: dict[str, Any]) -> object:
        self.asked.append(request)
        if request["verb"] in self.refuses:
            return {"error": {"exit_code": 1, "message": "too late", "remedy": ""}}
        match request["verb"]:
            case "status":
                return {"ok": self.status}
            case "peers":
                return {"ok": self.peers}
            case "history":
                steps = [step for step in self.steps if step["step"] >= request["since"]]
                return {"ok": {"schema": 1, "steps": steps, "events": self.events[request["after"] :]}}
        return {"ok": {"schema": 1}}


@pytest.fixture
def home() -> Iterator[Home]:
    folder = Path(tempfile.mkdtemp(prefix="peerd-t-"))
    yield Home(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def daemon(home: Home) -> Iterator[Daemon]:
    found = Daemon()
    with serving(home, found.answer):
        yield found


def app_of(home: Home) -> TopApp:
    feed = Feed(ControlClient(home))
    return TopApp(feed, feed.ask())


def screen_of(app: TopApp) -> str:
    """The text on the screen, line by line."""
    lines: dict[float, list[tuple[float, str]]] = {}
    for attributes, text in re.findall(r"<text ([^>]*)>(.*?)</text>", app.export_screenshot(), re.DOTALL):
        x, y = (float(re.search(rf'\b{axis}="([\d.]+)"', attributes)[1]) for axis in "xy")  # type: ignore[index]
        lines.setdefault(y, []).append((x, html.unescape(text).replace("\xa0", " ")))
    return "\n".join("".join(text for _, text in sorted(parts)) for _, parts in sorted(lines.items()))


async def until(pilot: Pilot[None], app: TopApp, found: Callable[[str], bool]) -> str:
    deadline = time.monotonic() + WITHIN_S
    while not found(text := screen_of(app)):
        assert time.monotonic() < deadline, text
        await pilot.pause(0.02)
    return text


def shows(*words: str) -> Callable[[str], bool]:
    return lambda text: all(word in text for word in words)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_everything_that_matters_is_on_the_first_screen(home: Home, daemon: Daemon, size: tuple[int, int]) -> None:
    app = app_of(home)
    words = (
        *(
            "demo",
            "step 3 of 30",
            "4 peers in 2 stages",
            "live, up 1h02m",
            "loss 3.2100",
            "evaluation 3.4000 at 2",
            "tokens/s 5.12K",
            "stage 0",
            "stage 1",
            "you",
        ),
        *(
            "accumulating",
            "7/16",
            "samples/s",
            "247",
            "25% of those here",
            "0 counted twice, 0 lost",
            "9 microbatches of step 3 are missing",
        ),
        *("all stages have 2 queued", "l leave", "q quit"),
    )
    async with app.run_test(size=size) as pilot:
        await until(pilot, app, shows(*words))


async def test_a_scrollbar_hides_nothing_and_each_heading_stands_above_its_column(home: Home, daemon: Daemon) -> None:
    daemon.peers = dict(peers_reply(peers_per_stage=20))
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        text = await until(pilot, app, lambda text: "stage 0 (20)" in text)
        assert app.query_one("#head").outer_size.width == app.query_one(SwarmList).outer_size.width
    shown = [line for line in text.splitlines() if "accumulating" in line and ".." in line and "you " not in line]
    assert shown
    assert all("123" in line for line in shown)


async def test_it_follows_the_swarm(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, app, lambda text: "step 3 of 30" in text)
        changed = peers_reply(num_stages=2)
        changed["work_step"] = 4
        changed["stages"][1]["peers"][0]["suspect"] = True
        daemon.events = [dict(event_info(1, "suspect", peer=changed["stages"][1]["peers"][0]["id"], time_s=time.time()))]
        daemon.peers = dict(changed)
        await until(pilot, app, shows("step 4 of 30", "! suspect", "..xxxx10 fell silent in stage 1: suspect"))
        await until(pilot, app, lambda _text: daemon.asked[-1].get("after") == 1)


async def test_nothing_behind_a_dialog_moves(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        before = await until(pilot, app, shows("stage 1 (2)"))
        await pilot.press("l")
        behind = await until(pilot, app, shows("Shall your daemon leave"))
        assert behind.splitlines()[:2] == before.splitlines()[:2]


def test_the_history_is_asked_for_only_where_it_may_have_grown(home: Home, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peerd.cli.top.feed.HISTORY_PERIOD_S", 1e9)
    feed = Feed(ControlClient(home))
    first = [feed.ask() for _ in range(3)]
    assert [request["verb"] for request in daemon.asked].count("history") == 1
    assert first[0].losses == first[2].losses == (5.0, 4.0, 3.0)
    daemon.steps.append({"step": 3, "loss": 2.0, "tokens": 8192, "time_s": 1003.0})
    daemon.peers["work_step"] = 4
    assert feed.ask().losses == (5.0, 4.0, 3.0, 2.0)


async def test_with_several_devices_one_key_pauses_and_ends_all_of_them(home: Home, daemon: Daemon) -> None:
    second, absent = Daemon(), ControlClient(home.of_device(2))
    with serving(home.of_device(1), second.answer):
        feed = Feed(ControlClient(home), {"cuda:1": ControlClient(home.of_device(1)), "cuda:2": absent})
        app = TopApp(feed, feed.ask())
        async with app.run_test(size=(120, 40)) as pilot:
            await until(pilot, app, shows("cuda:1", "cuda:2", "does not answer"))
            for keys, verb in ((["p"], "pause"), (["l", "y"], "leave")):
                await pilot.press(*keys)
                await until(pilot, app, lambda _text, verb=verb: all(verb in verbs_of(each) for each in (daemon, second)))  # type: ignore[misc]


def verbs_of(daemon: Daemon) -> list[str]:
    return [request["verb"] for request in daemon.asked]


async def test_a_daemon_that_ends_is_told_and_shown_again_when_it_comes_back(home: Home) -> None:
    daemon = Daemon()
    with serving(home, daemon.answer):
        app = app_of(home)
        context = app.run_test(size=(80, 24))
        pilot = await context.__aenter__()
    try:
        await until(pilot, app, shows("last heard", f"! no peerd daemon runs from {home.folder}", "stage 1"))  # what was last seen stays
        daemon.status["pid"] = 77
        daemon.events = [dict(event_info(1, "started", time_s=time.time()))]
        with serving(home, daemon.answer):
            await until(
                pilot, app, lambda text: shows("live, up", "your daemon started and serves stage 1")(text) and "no peerd daemon" not in text
            )
    finally:
        await context.__aexit__(None, None, None)


async def test_a_reply_that_cannot_be_understood_is_told_and_does_not_end_it(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(100, 24)) as pilot:
        daemon.peers = {"schema": 1}
        await until(pilot, app, lambda text: "! the daemon's reply cannot be understood" in text)
        daemon.peers = dict(peers_reply())
        await until(pilot, app, lambda text: "live, up" in text)


@pytest.mark.parametrize("reply", [{}, {"stages": 3}, {"stages": [{"stage": "x"}], "run": None}, {"stages": [], "run": run_info()}])
def test_a_daemon_that_cannot_be_understood_at_first_is_one_clear_error(home: Home, daemon: Daemon, reply: dict[str, Any]) -> None:
    daemon.peers = {"schema": 1, **reply}
    with pytest.raises(PeerdError, match="cannot be understood"):
        Feed(ControlClient(home)).ask()


async def test_keys_walk_fold_and_show_a_peer(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        swarm = app.query_one(SwarmList)
        assert swarm.chosen == (0, daemon.status["peer"]["id"])  # my own row at first
        await pilot.press("end", "enter")
        await until(pilot, app, shows("esc close", f"12D3KooW{'x' * 40}11", "/ip4/127.0.0.1/tcp/31337"))
        await pilot.press("escape", "home", "enter")
        text = await until(pilot, app, lambda text: "\u25b8 stage 0 (2)" in text)
        assert "you" not in text.split("stage 1")[0].rpartition("stage 0")[2]
        await pilot.press("m")
        await until(pilot, app, lambda text: "\u25be stage 0 (2)" in text)
        await pilot.press("f")
        await until(pilot, app, shows("\u25b8 stage 1 (2)", "\u25b8 stage 0 (2)"))


async def test_an_open_peer_that_goes_is_told(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("end", "enter")
        await until(pilot, app, lambda text: "esc close" in text)
        daemon.peers = dict(peers_reply(peers_per_stage=1))
        await until(pilot, app, shows("not in the swarm any more", f"12D3KooW{'x' * 40}11"))


async def test_what_is_heard_while_it_quits_is_let_go(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("end", "enter")
        for screen in app.screen_stack:
            await screen.query("*").remove()
        app.call_later(app.heard, app._picture)
        await pilot.press("ctrl+c")
    assert app.return_code == 0


async def test_the_cursor_stays_with_its_peer_while_others_come_and_go(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        swarm = app.query_one(SwarmList)
        await pilot.press("end")
        chosen = swarm.chosen
        reply = peers_reply()
        reply["stages"][0]["peers"] = [peer_info(id=f"newcomer{number}") for number in range(7)]
        reply["stages"][1]["peers"].insert(0, peer_info(id="another", stage=1))
        daemon.peers = dict(reply)
        await until(pilot, app, lambda text: "10 peers in 2 stages" in text)
        assert swarm.chosen == chosen
        await until(pilot, app, lambda text: "..xxxx11" in text)  # and in sight


async def test_one_key_pauses_and_goes_on(home: Home, daemon: Daemon) -> None:
    def orders() -> list[str]:
        return [request["verb"] for request in daemon.asked if request["verb"] in ("pause", "resume")]

    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("p")
        await until(pilot, app, lambda _text: orders() == ["pause"])
        daemon.status["owner"] = owner_info(paused="its owner paused it", until="after `peerd resume`")
        await until(pilot, app, lambda text: "paused, up" in text)
        await pilot.press("p")
        await until(pilot, app, lambda _text: orders() == ["pause", "resume"])
        daemon.status["owner"] = owner_info()
        await until(pilot, app, lambda text: "live, up" in text)


async def test_leaving_asks_first(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("l")
        await until(pilot, app, lambda text: "Shall your daemon leave the swarm?" in text)
        await pilot.press("n")
        await until(pilot, app, lambda text: "Shall your daemon" not in text)
        assert [request for request in daemon.asked if request["verb"] == "leave"] == []
        await pilot.press("l", "y")
        await until(pilot, app, lambda text: "left, up" in text)
        assert [request for request in daemon.asked if request["verb"] == "leave"] == [{"verb": "leave", "now": False}]
        daemon.status["pid"] = 77
        await until(pilot, app, lambda text: "live, up" in text)


@pytest.mark.parametrize(("keys", "words"), [(("p",), "! it does not pause: too late"), (("l", "y"), "! it does not leave: too late")])
async def test_what_the_daemon_refuses_to_do_is_told_and_watching_goes_on(
    home: Home, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, keys: tuple[str, ...], words: str
) -> None:
    monkeypatch.setattr(app_module, "REFUSAL_SHOWN_S", 10 * WITHIN_S)  # longer than a slow machine takes to look
    daemon.refuses = {"pause", "leave"}
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(*keys)
        await until(pilot, app, shows(words))
        daemon.peers["work_step"] = 4
        await until(pilot, app, shows(words, "step 4 of 30", "live, up"))


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_it_quits(home: Home, daemon: Daemon, key: str) -> None:
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press(key)
        await pilot.pause()
    assert app.return_code == 0


@pytest.mark.slow
async def test_it_can_be_resized_to_anything(home: Home, daemon: Daemon) -> None:
    app = app_of(home)
    async with app.run_test(size=(80, 24)) as pilot:
        for size in ((200, 60), (40, 10), (10, 3), (1, 1), (130, 24), (80, 24)):
            await pilot.resize_terminal(*size)
            await pilot.press("down", "l", "n", "m", "enter", "escape")
        await until(pilot, app, shows("q quit", "stage 1 (2)"))


async def test_a_thousand_peers_cost_little_per_update(home: Home, daemon: Daemon) -> None:
    """Measured in processor time, so that other work of the machine does not count."""
    reply = peers_reply(num_stages=64, peers_per_stage=16)
    app = app_of(home)
    async with app.run_test(size=(200, 60)) as pilot:
        app._feed.stop()
        swarm = app.query_one(SwarmList)
        best_s = float("inf")
        recall = Recall()
        for number in range(5):
            for stage in reply["stages"]:
                for peer in stage["peers"]:
                    peer["queue"] = number
            began_s = time.process_time()
            now = Poll(at_s=float(number), status=status_reply(), peers=reply, steps=())
            recall = recall.after(now)
            swarm.show(picture_of(now, recall))
            await pilot.pause()
            best_s = min(best_s, time.process_time() - began_s)
    assert best_s < 0.1
