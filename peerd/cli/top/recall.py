"""The state that `peerd top` keeps between polls: losses, speeds, traffic, and the events since it began."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from peerd.cli.render import name_of, plain, short_id
from peerd.control.protocol import EvaluationInfo, EventInfo, PeersReply, StatusReply, StepInfo

KEPT_STEPS = 2000
KEPT_EVENTS = 200
TRAFFIC_WINDOW_S = 10.0
SPEED_WINDOW = 5
"""Number of steps over which a speed is measured."""
MOST_NAMES = 2000
MOST_TOLD_APART = 5
"""If more peers than this do the same between two polls, one line counts them."""
_WORDS = {
    "started": "started and serves stage {stage}",
    "joined": "joined stage {stage}",
    "left": "left stage {stage}",
    "gone": "vanished from stage {stage}",
    "banned": "was banned by the organiser: {text}",
    "lifted": "is no longer banned",
    "moved": "moved {text} to stage {stage}",
    "suspect": "fell silent in stage {stage}: suspect",
    "back": "was heard again in stage {stage}",
    "paused": "pauses in stage {stage}",
    "leaving": "began to leave stage {stage}",
    "unaveraged": "works for nothing in stage {stage}: its {text}",
    "averaged": "is in the averages of stage {stage} again",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Poll:
    """The daemon's answers at one time."""

    at_s: float
    """Monotonic clock of this process."""
    status: StatusReply
    peers: PeersReply
    steps: tuple[StepInfo, ...]
    evaluations: tuple[EvaluationInfo, ...] = ()
    events: tuple[EventInfo, ...] = ()
    further: Mapping[str, StatusReply | None] = field(default_factory=dict)
    """The status of the daemons of this home's other devices, by device; None for one that does not answer."""

    @property
    def own(self) -> tuple[StatusReply, ...]:
        """The status of each own daemon that answers."""
        return (self.status, *filter(None, self.further.values()))


@dataclass(frozen=True, slots=True)
class ByteCount:
    at_s: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, slots=True)
class EventLine:
    clock: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Everything remembered; `after` returns the next one."""

    pid: int = 0
    steps: tuple[StepInfo, ...] = ()
    """Steps of the daemon's history, in order: all of them in the last stage, which knows the losses, few in other stages."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Loss by step, in order: from the history, else from the polls during the following step."""
    evaluations: Mapping[int, float] = field(default_factory=dict)
    """Loss on the evaluation text by the step that its parameters begin, in order."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Tokens per second by step, from the same sources."""
    traffic: tuple[ByteCount, ...] = ()
    began_s: float = 0.0
    """Wall clock; earlier events are not shown."""
    last_event: int = 0
    """Number of the newest event received."""
    events: tuple[EventLine, ...] = ()
    """The latest last."""
    names: Mapping[str, str] = field(default_factory=dict)
    """What peers call themselves, by id; also of those that are gone."""

    @property
    def ask_since(self) -> int:
        """The first step to ask for. It overlaps the known ones, because a step's loss may become known after the next has begun."""
        return max(0, self.steps[-1]["step"] - 8) if self.steps else 0

    def of_daemon(self, pid: int) -> Recall:
        """The part that remains valid for the daemon with this process id: for a restarted one only the events."""
        return self if pid == self.pid else Recall(pid=pid, began_s=self.began_s, events=self.events, names=self.names)

    def after(self, poll: Poll) -> Recall:
        known = self.of_daemon(poll.status["pid"])
        present = {peer["id"]: name for stage in poll.peers["stages"] for peer in stage["peers"] if (name := name_of(peer))}
        names = dict([*{**known.names, **present}.items()][-MOST_NAMES:])
        shown = event_lines((event for event in poll.events if event["time_s"] >= self.began_s), poll.status["peer"]["id"], names)
        last = max((event["number"] for event in poll.events), default=known.last_event)
        return replace(known, last_event=last, events=(*known.events, *shown)[-KEPT_EVENTS:], names=names)._measured(poll)

    def _measured(self, poll: Poll) -> Recall:
        counters = [status["counters"] for status in poll.own]
        latest = ByteCount(poll.at_s, sum(each["bytes_sent"] for each in counters), sum(each["bytes_received"] for each in counters))
        traffic = tuple(entry for entry in self.traffic if poll.at_s - entry.at_s < TRAFFIC_WINDOW_S)
        by_step = {entry["step"]: entry for entry in (*self.steps, *poll.steps)}
        steps = tuple(by_step[step] for step in sorted(by_step)[-KEPT_STEPS:])
        seen, loss, speed = poll.peers["work_step"], poll.peers["last_loss"], poll.peers["tokens_per_second"]
        losses = {seen - 1: loss} if seen and loss is not None else {}
        speeds = {seen: speed} if seen is not None and speed > 0 else {}
        newest = poll.peers.get("evaluation")
        evaluated = {each["step"]: each["loss"] for each in (*poll.evaluations, *([newest] if newest else []))}
        return replace(
            self,
            traffic=(*traffic, latest),
            steps=steps,
            losses=_course({**self.losses, **losses, **{entry["step"]: entry["loss"] for entry in steps}}),
            evaluations=_course({**self.evaluations, **evaluated}),
            speeds=_course({**self.speeds, **speeds, **dict(speeds_of(steps))}),
        )

    def bytes_per_second(self) -> tuple[float, float]:
        """Bytes sent and received per second, over the last seconds."""
        if len(self.traffic) < 2 or self.traffic[-1].at_s <= self.traffic[0].at_s:
            return 0.0, 0.0
        first, last = self.traffic[0], self.traffic[-1]
        span_s = last.at_s - first.at_s
        return (last.sent_bytes - first.sent_bytes) / span_s, (last.received_bytes - first.received_bytes) / span_s


def _course(values: Mapping[int, float]) -> Mapping[int, float]:
    """The finite values of the last steps, in order."""
    return {step: values[step] for step in sorted(values)[-KEPT_STEPS:] if math.isfinite(values[step])}


def speeds_of(steps: tuple[StepInfo, ...]) -> Iterator[tuple[int, float]]:
    """Tokens per second by step, for steps whose end this daemon saw; others have no time."""
    timed = [entry for entry in steps if entry["time_s"] > 0]
    for index in range(1, len(timed)):
        first, last = timed[max(0, index - SPEED_WINDOW)], timed[index]
        span_s = last["time_s"] - first["time_s"]
        if span_s > 0:
            yield last["step"], (last["step"] - first["step"]) * last["tokens"] / span_s


def event_lines(events: Iterable[EventInfo], me: str, names: Mapping[str, str]) -> Iterator[EventLine]:
    """The daemon's events about peers, in words; where the same happened to many peers, one line counts them. `names`: by id."""
    alike: dict[str, list[EventInfo]] = {}
    for event in events:
        if event["kind"] in _WORDS:
            alike.setdefault(plain(_WORDS[event["kind"]].format(**event)), []).append(event)
    for what, found in alike.items():
        if len(found) > MOST_TOLD_APART:
            yield EventLine(_clock(found[-1]), f"{len(found)} peers: {what}")
        else:
            yield from (EventLine(_clock(event), f"{_name(event, me, names)} {what}") for event in found)


def _name(event: EventInfo, me: str, names: Mapping[str, str]) -> str:
    if event["kind"] == "started":
        return "your daemon"
    return "you" if event["peer"] == me else f"{short_id(event['peer'])} {names.get(event['peer'], '')}".strip()


def _clock(event: EventInfo) -> str:
    return time.strftime("%H:%M:%S", time.localtime(event["time_s"]))
