"""The dashboard's part in the daemon: its socket and token, and where it gets what it shows.

The socket is bound when the daemon starts, so that a port in use is said at once and the address is known; the HTTP library
is loaded after that, in the background. A browser that is quicker waits in the socket's backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import structlog

from peerd.config.atomic import replace_file
from peerd.config.paths import Home
from peerd.config.settings import Settings
from peerd.control.protocol import SCHEMA, PeerInfo
from peerd.control.server import Say
from peerd.control.states import state_of
from peerd.daemon.answers import Answers, join_line
from peerd.daemon.peer import Peer
from peerd.daemon.watching.observer import Observer
from peerd.daemon.watching.sample import Sampler
from peerd.errors import PeerdError, PortTakenError, UsageError
from peerd.observe.entries import Event, FinishedStep, Sample
from peerd.observe.store import HistoryStore
from peerd.observe.thinning import at_most, every_so_many
from peerd.observe.web.guard import OPENS, Access, Codes
from peerd.table.record import Evaluation

POINTS = 600
"""So many samples are drawn at most."""
SHOWN_STEPS = 2000
SHOWN_EVENTS = 100
CHURN_SPANS = 200
"""Into so many parts of the time that is shown are comings and goings counted."""
RECENT_STEPS = 50
OWN_FIELDS = ("join", "counters", "decision", "joining", "rebalancing", "moves", "health", "uptime_s", "texts")
PAUSES = (("while_used", "while used"), ("on_battery", "on battery"), ("on_metered", "on a metered line"))
"""Limits that pause a machine by themselves, with the page's words for them."""
RECENT_S = 10.0
CONTRIBUTIONS_KEPT_S = 15.0
BACKLOG = 64
LOG = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the dashboard is served, and the token for acting in it."""

    listener: socket.socket
    host: str
    port: int
    token: str

    @property
    def address(self) -> str:
        """What to open on this machine, or on another where the host says so."""
        shown = "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104
        return f"http://[{shown}]:{self.port}/" if ":" in shown else f"http://{shown}:{self.port}/"

    @property
    def address_with_token(self) -> str:
        return f"{self.address}?token={self.token}"

    def address_with(self, code: str) -> str:
        """For a browser's command line."""
        return f"{self.address}{OPENS.removeprefix('/')}{code}"


def take_place(settings: Settings, home: Home) -> Spot:
    """Bind the socket. PortTakenError where the port that was asked for is not to be had."""
    known_port, known_token = _recall(home)
    token = known_token or secrets.token_hex(24)
    listener = _bind(settings.dashboard_host, settings.dashboard_port or known_port, must=bool(settings.dashboard_port))
    place = Spot(listener, settings.dashboard_host, listener.getsockname()[1], token)
    if (place.port, token) != (known_port, known_token):
        with contextlib.suppress(PeerdError):  # a full disk costs no more than another port next time
            replace_file(home.dashboard, json.dumps({"port": place.port, "token": token}), mode=0o600)
    return place


def _recall(home: Home) -> tuple[int, str]:
    """Port and token of last time: a page that is open goes on with the next daemon."""
    try:
        known = json.loads(home.dashboard.read_text())
        port, token = known["port"], known["token"]
    except (OSError, ValueError, KeyError, TypeError):
        return 0, ""
    sound = type(port) is int and 0 < port < 65536 and isinstance(token, str) and len(token) == 48
    return (port, token) if sound else (0, "")


def _bind(host: str, port: int, must: bool) -> socket.socket:
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        raise UsageError(f"--dashboard-host {host}: not an IP address", "name one of this machine's, or 0.0.0.0 for all") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if port and not must:
            return _bind(host, 0, must=True)
        why = f"the dashboard cannot listen on {host} port {port}: {error.strerror}"
        raise PortTakenError(why, "choose another --dashboard-port, or --no-dashboard") from None
    return listener


async def no_dashboard(_request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
    """The control verb where there is none."""
    raise UsageError("this daemon was started with --no-dashboard", "start it without that flag")


class Dashboard:
    """Runs for as long as the daemon."""

    def __init__(
        self, place: Spot, peer: Peer, answers: Answers, observer: Observer | None, public: bool, sampler: Sampler | None = None
    ) -> None:
        self.place = place
        self._peer, self._answers, self._observer = peer, answers, observer
        self._archive, self._past = peer.archive, peer.past
        self._public, self._sampler = public, sampler
        self._codes = Codes()
        self._scrape: Callable[[], bytes] | None = None
        self._asked: tuple[float, Mapping[str, Any]] = (float("-inf"), {})
        self._asking = asyncio.Lock()
        self._num_told = -1
        """So much had been noted when the page last heard what is new."""

    async def run(self) -> None:
        """Serves until cancelled. Whatever goes wrong with the dashboard costs the dashboard only."""
        try:
            server = await asyncio.to_thread(importlib.import_module, "peerd.observe.web.pages")
            access = Access(host=self.place.host, port=self.place.port, token=self.place.token, public=self._public)
            async with server.dashboard(self.place.listener, self, access):
                LOG.info("dashboard", address=self.place.address)
                await asyncio.Event().wait()
        except Exception as error:  # the edge of what only shows: training goes on without it
            LOG.warning("no dashboard", error=repr(error))
        finally:
            self.place.listener.close()

    async def tell(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        """The control verb."""
        if self._public:
            return {"schema": SCHEMA, "address": self.place.address}
        told = {"schema": SCHEMA, "address": self.place.address_with_token}
        if request.get("open") is not True:
            return told
        code = secrets.token_urlsafe(24)
        self._codes.add(code, time.monotonic())
        return told | {"open": self.place.address_with(code)}

    # What the page asks for

    async def past(self, reach_s: float) -> Mapping[str, Any]:
        since_s = max(0.0, time.time() - reach_s)

        def seen(store: HistoryStore) -> tuple[list[FinishedStep], list[Sample], list[Event], list[tuple[float, str, int]]]:
            within = [entry for entry in store.steps() if (entry.time_s or 0.0) >= since_s]  # when the earliest were over nobody here knows
            samples = at_most(store.samples(since_s), POINTS)
            churn = store.churn(since_s, max(1.0, _span_s(samples) / CHURN_SPANS))
            return every_so_many(within, SHOWN_STEPS), samples, store.events(0, SHOWN_EVENTS), churn

        steps, samples, events, churn = await self._archive.read(seen) or ([], [], [], [])
        return {
            "run": self._answers.run_info(),
            "me": self._peer.membership.me,
            "steps": [_step(entry) for entry in steps],
            "evaluations": [_evaluation(each) for each in (await self._past.all_evaluations())[-SHOWN_STEPS:]],
            "samples": [_sample(sample) for sample in samples],
            "reach_s": reach_s if math.isfinite(reach_s) else None,
            "spacing_s": min(reach_s, _span_s(samples)) / POINTS,
            "events": [asdict(event) for event in events],
            "churn": churn,
        }

    async def now(self, seen: Mapping[str, int]) -> Mapping[str, Any]:
        def newer(store: HistoryStore) -> tuple[list[FinishedStep], list[Sample], list[Event]]:
            recent = store.steps(max(0, seen.get("step", 0) - 2), RECENT_STEPS), store.samples(time.time() - RECENT_S)
            return (*recent, store.events(seen.get("event", 0), SHOWN_EVENTS))

        found: tuple[list[FinishedStep], list[Sample], list[Event]] | None = None
        if self._archive.num_noted != self._num_told:
            self._num_told = self._archive.num_noted
            found = await self._archive.read(newer)
        steps, samples, events = found or ([], [], [])
        table = self._answers.table()
        own = await self._answers.status({}, lambda _text: None)
        mine = next((peer for stage in table["stages"] for peer in stage["peers"] if peer["id"] == self._peer.membership.me), own["peer"])
        return {
            "time_s": time.time(),
            "step": table["work_step"],
            "loss": table["last_loss"],
            "evaluation": _evaluation(evaluation) if (evaluation := self._peer.seat.training.evaluation) else None,
            "tokens_per_second": table["tokens_per_second"],
            "outdated": bool(table.get("outdated")),
            "sample": self._sampler.newest if self._sampler is not None else None,
            "num_peers": sum(stage["num_peers"] for stage in table["stages"]),
            "stages": [{**stage, "peers": [_peer(peer) for peer in stage["peers"]]} for stage in table["stages"]],
            "own": {
                **{name: own[name] for name in OWN_FIELDS},
                "peer": {**mine, "addresses": []},
                "paused": bool(own["owner"]["paused"]),
                "nice": own["owner"].get("nice", 0),
                "pauses": [when for name, when in PAUSES if not own["owner"]["limits"][name]],
                "invited": self._peer.place.manifest.swarm.access == "invited",
            },
            "steps": [_step(entry) for entry in steps],
            "samples": [_sample(sample) for sample in samples],
            "events": [asdict(event) for event in events],
            "seen": {
                "step": max((entry.step for entry in steps), default=seen.get("step", 0)),
                "event": max((event.number for event in events), default=seen.get("event", 0)),
            },
        }

    async def contributions(self) -> Mapping[str, Any]:
        async with self._asking:
            asked_s, told = self._asked
            if time.monotonic() - asked_s > CONTRIBUTIONS_KEPT_S:
                told = await self._past.contributions({}, lambda _text: None)
                self._asked = (time.monotonic(), told)
            return told

    def join_address(self) -> str:
        return join_line(self._peer)

    async def leave(self) -> None:
        self._answers.ask_to_leave()

    async def pause(self, yes: bool) -> None:
        await self._answers.ask_to_pause(yes)

    def take_code(self, code: str) -> bool:
        return self._codes.take(code, time.monotonic())

    def metrics(self) -> bytes:
        if self._scrape is None:
            from peerd.daemon.watching.readings import readings
            from peerd.observe.metrics import scraper

            self._scrape = scraper(lambda: readings(self._peer, self._answers, self._observer))
        return self._scrape()


def _peer(peer: PeerInfo) -> Sequence[object]:
    """A row as the page's map reads it: shorter by two thirds than with its names, which counts with a thousand of them."""
    phase = state_of(peer) or peer["phase"]
    throughput = float(f"{peer['throughput']:.3g}")
    work = [peer["id"], phase, peer["step"], peer["done"], peer["queue"], throughput, peer["tokens"], peer["device"], peer["in_flight"]]
    place = peer.get("coordinate")
    row = [*work, peer["reach"], peer["up"], peer["down"], [round(1000 * each, 1) for each in place[:3]] if place else None]
    names = [peer.get("nickname", ""), peer.get("team", "")]
    return [*row, *names] if any(names) else row


def _span_s(samples: Sequence[Sample]) -> float:
    return samples[-1].time_s - samples[0].time_s if samples else 0.0


def _step(entry: FinishedStep) -> Sequence[object]:
    return [entry.step, entry.loss, entry.time_s]


def _evaluation(evaluation: Evaluation) -> Sequence[object]:
    return [evaluation.step, evaluation.loss]


def _sample(sample: Sample) -> Sequence[object]:
    sent, received = (sample.counters.get(name, 0) / max(sample.span_s, 1e-9) for name in ("bytes_sent", "bytes_received"))
    rate = round(sample.tokens_per_second, 1)
    return [round(sample.time_s, 1), rate, round(sent), round(received), list(sample.peers), list(sample.queue), sample.suspects]
