"""What is remembered from one poll to the next: losses and speeds, traffic, and who came, went, moved or fell silent.

The daemon keeps no account of others' comings and goings; what is told here was seen while `peerd top` ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from peerd.cli.render import phase_of, short_id
from peerd.control.protocol import PeerInfo, PeersReply, StageInfo, StatusReply, StepInfo

KEPT_STEPS = 2000
KEPT_EVENTS = 200
TRAFFIC_WINDOW_S = 10.0
SPEED_WINDOW = 5
"""Steps over which a speed is taken."""
MOST_TOLD_APART = 5
"""Where more peers do the same at once, they are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """What the daemon answered at one moment."""

    at_s: float
    """On the reader's monotonic clock."""
    clock: str
    """The time of day."""
    status: StatusReply
    peers: PeersReply
    steps: tuple[StepInfo, ...]


@dataclass(frozen=True, slots=True)
class ByteCount:
    at_s: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """Where a peer was, and whether it was in doubt."""

    stage: int
    suspect: bool
    leaving: bool
    sampled: bool = False
    """In a stage of a large swarm of which the daemon knows only some peers, now these and now those."""


@dataclass(frozen=True, slots=True)
class Event:
    clock: str
    text: str


def _nothing() -> Mapping[int, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Everything remembered; `after` gives the next one."""

    pid: int = 0
    steps: tuple[StepInfo, ...] = ()
    """What the daemon's own history tells, in order: all of it in the last stage, which knows the losses, little elsewhere."""
    losses: Mapping[int, float] = field(default_factory=_nothing)
    """By step, in order; from the history, else as seen while the step after it was at work."""
    speeds: Mapping[int, float] = field(default_factory=_nothing)
    """Tokens per second, likewise."""
    traffic: tuple[ByteCount, ...] = ()
    places: Mapping[str, PeerPlace] = field(default_factory=lambda: MappingProxyType({}))
    events: tuple[Event, ...] = ()
    """The latest last."""

    @property
    def ask_since(self) -> int:
        """The first step to ask for: a step's loss may be known after the next one has begun."""
        return max(0, self.steps[-1]["step"] - 8) if self.steps else 0

    def after(self, poll: Poll) -> Recall:
        status = poll.status
        if status["pid"] != self.pid:
            told = [Event(poll.clock, "your daemon was started again")] if self.pid else []
            return replace(Recall(pid=status["pid"], events=(*self.events, *told)), places=places_of(poll.peers))._measured(poll)
        places = places_of(poll.peers)
        happened = tuple(Event(poll.clock, text) for text in changes(self.places, places, status["peer"]["id"]))
        return replace(self, places=places, events=(*self.events, *happened)[-KEPT_EVENTS:])._measured(poll)

    def _measured(self, poll: Poll) -> Recall:
        counters = poll.status["counters"]
        latest = ByteCount(poll.at_s, counters["bytes_sent"], counters["bytes_received"])
        traffic = tuple(entry for entry in self.traffic if poll.at_s - entry.at_s < TRAFFIC_WINDOW_S)
        by_step = {entry["step"]: entry for entry in (*self.steps, *poll.steps)}
        steps = tuple(by_step[step] for step in sorted(by_step)[-KEPT_STEPS:])
        seen, loss, speed = poll.peers["work_step"], poll.peers["last_loss"], poll.peers["tokens_per_second"]
        losses = {seen - 1: loss} if seen and loss is not None else {}
        speeds = {seen: speed} if seen is not None and speed > 0 else {}
        return replace(
            self,
            traffic=(*traffic, latest),
            steps=steps,
            losses=_course({**self.losses, **losses, **{entry["step"]: entry["loss"] for entry in steps}}),
            speeds=_course({**self.speeds, **speeds, **dict(speeds_of(steps))}),
        )

    def bytes_per_second(self) -> tuple[float, float]:
        """Sent and received, over the last seconds."""
        if len(self.traffic) < 2 or self.traffic[-1].at_s <= self.traffic[0].at_s:
            return 0.0, 0.0
        first, last = self.traffic[0], self.traffic[-1]
        span_s = last.at_s - first.at_s
        return (last.sent_bytes - first.sent_bytes) / span_s, (last.received_bytes - first.received_bytes) / span_s


def _course(values: Mapping[int, float]) -> Mapping[int, float]:
    """Finite values of the last steps, in order."""
    return MappingProxyType({step: values[step] for step in sorted(values)[-KEPT_STEPS:] if math.isfinite(values[step])})


def speeds_of(steps: tuple[StepInfo, ...]) -> Iterator[tuple[int, float]]:
    """Tokens per second up to each step; a step that this daemon did not see end has no time."""
    timed = [entry for entry in steps if entry["time_s"] > 0]
    for index in range(1, len(timed)):
        first, last = timed[max(0, index - SPEED_WINDOW)], timed[index]
        span_s = last["time_s"] - first["time_s"]
        if span_s > 0:
            yield last["step"], (last["step"] - first["step"]) * last["tokens"] / span_s


def places_of(peers: PeersReply) -> Mapping[str, PeerPlace]:
    return MappingProxyType({peer["id"]: _place_of(peer, stage) for stage in peers["stages"] for peer in stage["peers"]})


def _place_of(peer: PeerInfo, stage: StageInfo) -> PeerPlace:
    sampled = stage.get("num_peers", 0) > len(stage["peers"])
    return PeerPlace(peer["stage"], phase_of(peer) == "suspect", peer["leaving"], sampled)


def changes(before: Mapping[str, PeerPlace], now: Mapping[str, PeerPlace], me: str) -> list[str]:
    """What befell whom, in words."""
    found: dict[str, list[str]] = {}
    for peer in sorted(now.keys() | before.keys()):
        what = _change(before.get(peer), now.get(peer))
        if what:
            found.setdefault(what, []).append("you" if peer == me else short_id(peer))
    return [text for what, who in found.items() for text in _told(what, who)]


def _change(before: PeerPlace | None, now: PeerPlace | None) -> str:
    if all(place is None or place.sampled for place in (before, now)):
        return ""
    if before is None:
        assert now is not None
        return f"joined stage {now.stage}"
    if now is None:
        return f"left stage {before.stage}" if before.leaving else f"vanished from stage {before.stage}"
    if now.stage != before.stage:
        return f"moved from stage {before.stage} to stage {now.stage}"
    if now.suspect != before.suspect:
        return f"fell silent in stage {now.stage}: suspect" if now.suspect else f"was heard again in stage {now.stage}"
    return f"began to leave stage {now.stage}" if now.leaving and not before.leaving else ""


def _told(what: str, who: list[str]) -> Iterable[str]:
    if len(who) > MOST_TOLD_APART:
        return [f"{len(who)} peers: {what}"]
    return [f"{name} {what}" for name in who]
