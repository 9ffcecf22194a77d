"""Faults on demand, for tests and the demo's chaos. This module runs only if Settings.allow_faults is set.

The control verb `fault` tells a daemon to be slow, to send broken messages, to cancel proposals, to fail calls to one peer, to find its
disk full or its clock off for a while, or to end, stop or fail at a named point of its work. `install` wraps public methods of other rooms,
so these rooms contain no code for faults. docs/faults.md says what follows from each fault.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import functools
import inspect
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import structlog

from peerd.averaging.exchange import Exchange
from peerd.averaging.rounds import Rounds
from peerd.control.protocol import SCHEMA
from peerd.control.server import Say
from peerd.daemon.peer import Peer
from peerd.errors import PeerGoneError, UsageError
from peerd.link.links import Links
from peerd.observe.store import HistoryStore
from peerd.stage import jobs
from peerd.stage.calls import StageService
from peerd.stage.disk_room import DiskRoom
from peerd.stage.snapshots import SnapshotServer
from peerd.stage.state import StageState
from peerd.wire.clients import StageClient
from peerd.wire.deliveries import Delivery
from peerd.wire.messages import TensorBytes
from peerd.wire.swarm_client import SwarmClient

SHARE_BROKEN = 0.25
"""Share of a corrupt peer's messages that are broken."""
MAX_FOR_S = 3600.0
MAX_CLOCK_OFF_S = 366 * 86400.0
AFTER_SENDING_S = 0.02
COPY_S = 0.2
NOT_FINITE = b"\xff" * 8
"""As float64 or float32 not a number, as a token in no vocabulary."""
LOG = structlog.get_logger()


class Point(enum.StrEnum):
    """A point of its work at which a daemon can be told to end."""

    QUEUED = "queued"
    """A microbatch has arrived completely and waits for its forward pass."""
    FORWARD = "forward"
    WAITING = "waiting"
    """The next stage has the microbatch; its gradient is not back."""
    BACKWARD = "backward"
    REPLY = "reply"
    """The gradient is added and its bit set; no peer has been told."""
    OPENED = "opened"
    """It has joined a round; its leader has not been told."""
    SENDER = "sender"
    """About to send a chunk of a round."""
    REDUCER = "reducer"
    """A chunk of a part has arrived for the slice that it reduces."""
    AVERAGED = "averaged"
    """It holds the average; no peer has been told."""
    COMMIT = "commit"
    """Others know that it holds the average; about to apply it."""
    COMMITTED = "committed"
    """The average is applied; no peer has been told."""
    DONOR = "donor"
    """Its snapshot is made and requested; nothing of it is sent."""
    JOINER = "joiner"
    """The stage's state has arrived completely and is not loaded yet."""


@dataclass(frozen=True, slots=True)
class FaultSite:
    """A function of a class or module, and the points that lie before and after it."""

    owner: type | ModuleType
    method: str
    before: tuple[Point, ...] = ()
    after: tuple[Point, ...] = ()


FAULT_SITES = (
    FaultSite(jobs, "forward", before=(Point.FORWARD,)),
    FaultSite(jobs, "backward", before=(Point.BACKWARD,), after=(Point.REPLY,)),
    FaultSite(jobs, "forward_backward", before=(Point.FORWARD, Point.BACKWARD), after=(Point.REPLY,)),
    FaultSite(StageState, "open_round", after=(Point.OPENED,)),
    FaultSite(StageState, "take_average", after=(Point.AVERAGED,)),
    FaultSite(StageState, "commit", before=(Point.COMMIT,), after=(Point.COMMITTED,)),
    FaultSite(StageState, "load", before=(Point.JOINER,)),
    FaultSite(Exchange, "frame", before=(Point.SENDER,)),
    FaultSite(Exchange, "take_part", before=(Point.REDUCER,)),
    FaultSite(SnapshotServer, "snapshot", after=(Point.DONOR,)),
)


class Faults:
    """The faults of one daemon. Contract: before the first request, each point costs only a test of two fields."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._back_to_usual: asyncio.TimerHandle | None = None
        self._armed: tuple[Point, signal.Signals | None] | None = None
        """None in place of a signal: an error that nothing expects."""
        self._corrupt_until_s = 0.0
        self._cancels_until_s = 0.0
        self._not_called: dict[str, float] = {}
        """Peers that this one cannot call, and until when."""
        self._disk_full_until_s = 0.0
        self._clock_off_s, self._clock_off_until_s = 0.0, 0.0
        self._random = random.Random(0)

    def install(self) -> None:
        for site in FAULT_SITES:
            _wrap(site.owner, site.method, functools.partial(_reaching, self, site))
        _wrap(StageService, "backpropagate", functools.partial(_serving, self))
        _wrap(StageClient, "backpropagate", functools.partial(_sending, self))
        _wrap(Exchange, "frame", functools.partial(_sending_chunk, self))
        for way in ("channel", "way_for_tensors", "quickest_channel"):
            _wrap(Links, way, functools.partial(_calling, self))
        _wrap(Rounds, "propose", functools.partial(_joining, self))
        _wrap(StageState, "open_round", functools.partial(_opening, self))
        for way in ("gossip", "tell"):
            _wrap(SwarmClient, way, functools.partial(_gossiping, self))
        _wrap(Delivery, "take", functools.partial(_delivering, self))
        for place, method in ((os, "fsync"), (DiskRoom, "writing"), (HistoryStore, "add")):
            _wrap(place, method, functools.partial(_writing, self))
        _skew_clock(self)

    async def fault(self, request: Mapping[str, Any], _say: Say) -> Mapping[str, Any]:
        """The control verb; see control/protocol.py."""
        match request.get("kind"):
            case "slow":
                self._slow(_number(request, "factor"), _number(request, "for_s"))
            case "corrupt":
                self._random = random.Random(request.get("seed", 0))
                self._corrupt_until_s = time.monotonic() + _number(request, "for_s")
            case "proposal-cancel":
                self._random = random.Random(request.get("seed", 0))
                self._cancels_until_s = time.monotonic() + _number(request, "for_s")
            case "one-way" if isinstance(request.get("peer"), str):
                self._not_called[request["peer"]] = time.monotonic() + _number(request, "for_s")
            case "disk-full":
                self._disk_full_until_s = time.monotonic() + _number(request, "for_s")
            case "skewed-clock":
                self._clock_off_s = _number(request, "by_s", -MAX_CLOCK_OFF_S, MAX_CLOCK_OFF_S)
                self._clock_off_until_s = time.monotonic() + _number(request, "for_s")
            case "kill" | "stop" | "bug" as kind if request.get("at") in list(Point):
                self._armed = (Point(request["at"]), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}.get(kind))
            case _:
                lasting = "slow, corrupt, proposal-cancel, one-way to a peer, disk-full, skewed-clock"
                raise UsageError(f"a fault is {lasting}, or kill, stop or bug at one of {', '.join(Point)}")
        LOG.warning("a fault was ordered", **{name: value for name, value in request.items() if name != "verb"})
        return {"schema": SCHEMA}

    def reach(self, point: Point) -> None:
        """Note that work has reached this point. Any thread may call this."""
        if self._armed is not None and self._armed[0] is point:
            number, self._armed = self._armed[1], None
            if number is None:
                raise TypeError(f"a bug at {point}, as ordered")
            if threading.current_thread() is not threading.main_thread():
                time.sleep(AFTER_SENDING_S)  # meanwhile the event loop sends what was written before this point
            os.kill(os.getpid(), number)

    @property
    def breaks_this_one(self) -> bool:
        """True if the current message is to be sent broken."""
        return time.monotonic() < self._corrupt_until_s and self._random.random() < SHARE_BROKEN

    @property
    def disk_is_full(self) -> bool:
        return time.monotonic() < self._disk_full_until_s

    @property
    def clock_off_s(self) -> float:
        """How far the wall clock of this process is ahead just now."""
        return self._clock_off_s if time.monotonic() < self._clock_off_until_s else 0.0

    def is_cut(self, callee: str) -> bool:
        """Whether calls to this peer fail, while those that it makes work."""
        return time.monotonic() < self._not_called.get(callee, 0.0)

    @property
    def cancels_proposals(self) -> bool:
        return time.monotonic() < self._cancels_until_s

    def moment_in_a_join(self) -> float:
        """Seconds after which the call of a proposal ends: before, in or after the copy of the accumulator."""
        return self._random.uniform(0.0, 2.5 * COPY_S)

    def broken(self, chunks: Sequence[Any]) -> tuple[Any, ...]:
        """Return the chunks with the first bytes replaced by NaN."""
        first, *rest = chunks or (b"",)
        return (NOT_FINITE[: len(first)] + first[len(NOT_FINITE) :], *rest)

    def broken_tensor(self, tensor: TensorBytes) -> TensorBytes:
        """Return a tensor that is not finite, or a row too short; tokens become values outside every vocabulary."""
        if self._random.random() < 0.5 and tensor.shape[0] > 1:
            row_bytes = tensor.num_bytes // tensor.shape[0]
            return TensorBytes(tensor.dtype, (tensor.shape[0] - 1, *tensor.shape[1:]), (b"".join(tensor.chunks)[:-row_bytes],))
        return tensor.with_chunks(self.broken(tensor.chunks))

    def broken_body(self, body: bytes) -> bytes:
        """Return the body with one byte changed."""
        at = self._random.randrange(len(body))
        return body[:at] + bytes([body[at] ^ 0x41]) + body[at + 1 :]

    def _slow(self, factor: float, for_s: float) -> None:
        if self._back_to_usual is not None:
            self._back_to_usual.cancel()
        self._set_pace(max(1.0, factor))
        self._back_to_usual = asyncio.get_running_loop().call_later(for_s, self._set_pace, 1.0)

    def _set_pace(self, factor: float) -> None:
        service, usual = self._peer.seat.service, self._peer.settings.slow_factor
        service.pace = replace(service.pace, slow_factor=usual * factor)


Method = Callable[..., Any]


def _wrap(owner: type | ModuleType, name: str, around: Callable[[Method, bool], Method]) -> None:
    """Wrap a method in `around` for the rest of this process."""
    method = getattr(owner, name)
    setattr(owner, name, functools.wraps(method)(around(method, inspect.iscoroutinefunction(method))))


def _reaching(faults: Faults, site: FaultSite, method: Method, is_async: bool) -> Method:
    def visit(points: Sequence[Point]) -> None:
        for point in points:
            faults.reach(point)

    async def later(*arguments: Any, **named: Any) -> Any:
        visit(site.before)
        result = await method(*arguments, **named)
        visit(site.after)
        return result

    def now(*arguments: Any, **named: Any) -> Any:
        visit(site.before)
        result = method(*arguments, **named)
        visit(site.after)
        return result

    return later if is_async else now


def _serving(faults: Faults, method: Method, _is_async: bool) -> Method:
    """Wrap a served microbatch: the point between its arrival and its forward pass, and a broken gradient."""

    async def backpropagate(self: Any, caller: Any, call: Any, receive: Any, progress: Any) -> Any:
        async def received() -> Any:
            chunks = await receive()
            faults.reach(Point.QUEUED)
            return chunks

        result = await method(self, caller, call, received, progress)
        if result.gradient is not None and faults.breaks_this_one:
            return replace(result, gradient=faults.broken_tensor(result.gradient))
        return result

    return backpropagate


def _sending(faults: Faults, method: Method, _is_async: bool) -> Method:
    """Wrap a microbatch sent to the next stage: the wait for its gradient, and broken activations."""

    async def backpropagate(self: Any, peer: Any, call: Any, *rest: Any) -> Any:
        if call.stage > 0:
            asyncio.get_running_loop().call_later(AFTER_SENDING_S, faults.reach, Point.WAITING)
        if faults.breaks_this_one:
            call = replace(call, inputs=faults.broken_tensor(call.inputs))
        return await method(self, peer, call, *rest)

    return backpropagate


def _calling(faults: Faults, method: Method, _is_async: bool) -> Method:
    """A call to a peer that this one cannot reach."""

    async def channel(self: Any, callee: Any, **named: Any) -> Any:
        if faults.is_cut(callee):
            raise PeerGoneError("the link is cut in this direction, as ordered")
        return await method(self, callee, **named)

    return channel


def _joining(faults: Faults, method: Method, _is_async: bool) -> Method:
    """A served proposal whose call ends while this peer joins the round."""

    async def propose(self: Any, caller: Any, roster: Any) -> Any:
        if not faults.cancels_proposals:
            return await method(self, caller, roster)
        try:
            async with asyncio.timeout(faults.moment_in_a_join()):
                return await method(self, caller, roster)
        except TimeoutError:
            raise PeerGoneError("the call of a proposal was cancelled, as ordered") from None

    return propose


def _opening(faults: Faults, method: Method, _is_async: bool) -> Method:
    """A copy of the accumulator that takes as long as a large one."""

    def open_round(self: Any, roster: Any) -> Any:
        if not faults.cancels_proposals:
            return method(self, roster)
        time.sleep(COPY_S)
        opened = method(self, roster)
        time.sleep(COPY_S)
        return opened

    return open_round


def _gossiping(faults: Faults, method: Method, _is_async: bool) -> Method:
    async def gossip(self: Any, peer: Any, records: Any, *rest: Any, **named: Any) -> Any:
        if records and faults.breaks_this_one:
            (body, signature), *others = records
            records = [(faults.broken_body(body), signature), *others]
        return await method(self, peer, records, *rest, **named)

    return gossip


def _sending_chunk(faults: Faults, method: Method, _is_async: bool) -> Method:
    """Wrap the chunks of a round that are sent."""

    async def frame(self: Any, *arguments: Any, **named: Any) -> Any:
        sent = await method(self, *arguments, **named)
        breaks = sent is not None and sent.chunks and faults.breaks_this_one
        return replace(sent, chunks=faults.broken(sent.chunks)) if breaks else sent

    return frame


def _delivering(faults: Faults, method: Method, _is_async: bool) -> Method:
    """Wrap the chunks of a state or an average that is sent."""

    def take(self: Any) -> Any:
        chunk = method(self)
        return b"".join(faults.broken([chunk])) if chunk and faults.breaks_this_one else chunk

    return take


def _writing(faults: Faults, method: Method, _is_async: bool) -> Method:
    """Every file that is to last is synced; what need not last is announced to the disk's room, or goes to the history."""

    def write(*arguments: Any, **named: Any) -> Any:
        if faults.disk_is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return method(*arguments, **named)

    return write


def _skew_clock(faults: Faults) -> None:
    """The wall clock of peerd's and hivemind's modules can be off. gRPC's stays right: it computes deadlines in C and in Python."""
    right = time
    skewed = ModuleType("time")
    vars(skewed).update({**vars(right), "time": lambda: right.time() + faults.clock_off_s})
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] in ("peerd", "hivemind")]:
        for name, value in list(vars(module).items()):
            if value is right and module.__name__ != __name__:
                setattr(module, name, skewed)
            elif value is right.time:
                setattr(module, name, skewed.time)


def _number(request: Mapping[str, Any], name: str, least: float = 0.0, most: float = MAX_FOR_S) -> float:
    value = request.get(name)
    if not isinstance(value, int | float) or not least <= value <= most:
        raise UsageError(f"a fault's {name} is a number from {least:g} to {most:g}")
    return float(value)
