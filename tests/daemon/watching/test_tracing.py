"""Bringing the peers' spans together: whom is asked, whose clock counts, and that who is silent costs a line and no more."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from peerd.control.protocol import MAX_LINE_BYTES
from peerd.daemon.peer import Peer
from peerd.daemon.watching import tracing
from peerd.daemon.watching.tracing import MAX_ASKED, MAX_SPANS_TOLD, Tracing, trace_reply, whom_to_ask
from peerd.errors import BadMessageError, PeerGoneError, TimedOutError, UsageError
from peerd.table.record import PeerId, PeerRecord, Phase
from peerd.table.view import LiveView
from peerd.timeline.spans import PeerTimeline, Span, SpanKind, SpanRing
from peerd.wire.swarm_client import ReceivedTimeline

ME = PeerId("me")
AHEAD_S = 1000.0


def record_of(peer: str, stage: int = 0, step: int = 0) -> PeerRecord:
    return PeerRecord(peer=PeerId(peer), incarnation=1, stage=stage, step=step, phase=Phase.ACCUMULATING)


class Client:
    """Peers by name: one that answers with a clock of its own, one that is gone, one that is silent, one that tells nonsense."""

    async def timeline(self, peer: PeerId, steps: tuple[int, int], most: int, _timeout_s: float) -> ReceivedTimeline:
        if peer == "gone":
            raise PeerGoneError("the connection was closed")
        if peer == "nonsense":
            raise BadMessageError("a timeline with an unknown kind or peer")
        if peer == "silent":
            await asyncio.Event().wait()
        now_s = time.monotonic()
        spans = [Span(SpanKind.COMMIT, now_s + AHEAD_S - 0.5, now_s + AHEAD_S, steps[1])] if most else []
        return ReceivedTimeline(spans=spans, complete=True, clock_s=now_s + AHEAD_S, asked_s=now_s - 0.001, answered_s=now_s + 0.001)


class Membership:
    def __init__(self, *others: PeerRecord) -> None:
        self.me = ME
        self.others = others
        self.state = SimpleNamespace(record=record_of("me"))
        self.looks = 0

    def live(self) -> LiveView:
        return LiveView(records=(self.state.record, *self.others), me=ME)

    async def changed(self, _timeout_s: float) -> bool:
        """A step goes by with every look."""
        self.looks += 1
        await asyncio.sleep(0)
        self.state.record = replace(self.state.record, step=self.state.record.step + 1)
        self.others = tuple(replace(record, step=record.step + 1) for record in self.others)
        return True


def tracing_of(membership: Membership, steps: int = 0) -> tuple[Tracing, SpanRing]:
    ring = SpanRing()
    train = SimpleNamespace(steps=steps, num_stages=2)
    place, seat = SimpleNamespace(manifest=SimpleNamespace(train=train, name="paper")), SimpleNamespace(stage=0, state=membership.state)
    peer = SimpleNamespace(membership=membership, seat=seat, spans=ring, place=place, swarm_client=Client())
    return Tracing(cast(Peer, peer)), ring


async def ask(found: Tracing, said: list[str] | None = None, **request: Any) -> Any:
    return await found.trace(request, said.append if said is not None else lambda _text: None)


async def test_all_are_brought_onto_this_peers_clock_and_the_silent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "ASK_TIMEOUT_S", 0.2)
    others = [record_of("far", 1), record_of("gone", 1), record_of("silent", 0), record_of("nonsense", 0)]
    found, ring = tracing_of(Membership(*others))
    ring.add(SpanKind.COMMIT, time.monotonic() - 0.5, 1)
    told = await ask(found, steps=2)
    assert (told["first_step"], told["last_step"], told["not_asked"]) == (0, 1, 0)
    mine, far = told["peers"]
    assert (mine["peer"], far["peer"]) == ("me", "far")
    assert far["offset_ms"] == pytest.approx(-1000 * AHEAD_S, abs=1)
    assert far["offset_error_ms"] == pytest.approx(1, abs=0.1)
    assert far["spans"][0][1] - mine["spans"][0][1] < 1_000_000  # within the second in which both happened
    reasons = {peer["peer"]: peer["reason"] for peer in told["silent"]}
    assert reasons == {
        "gone": "the connection was closed",
        "silent": "no answer within 0.2 s",
        "nonsense": "a timeline with an unknown kind or peer",
    }


async def test_it_waits_for_the_step_under_way_and_those_after_it() -> None:
    membership = Membership()
    membership.state.record = record_of("me", step=7)
    found, _ = tracing_of(membership)
    told = await ask(found, steps=3)
    assert (told["first_step"], told["last_step"]) == (7, 9)
    assert membership.state.record.step == 10


async def test_of_a_run_that_has_ended_it_takes_the_last_steps_and_waits_for_nothing() -> None:
    membership = Membership()
    membership.state.record = record_of("me", step=20)
    found, _ = tracing_of(membership, steps=20)
    told = await ask(found, steps=3)
    assert (told["first_step"], told["last_step"], membership.looks) == (17, 19, 0)


async def test_when_the_time_is_up_it_says_where_the_peer_is() -> None:
    found, _ = tracing_of(Membership())
    with pytest.raises(TimedOutError, match="waiting for 5"):
        await ask(found, steps=5, timeout_s=0)


@pytest.mark.parametrize("steps", [0, -1, 1001, "3", 1.5])
async def test_numbers_of_steps_that_cannot_be_are_refused(steps: object) -> None:
    found, _ = tracing_of(Membership())
    with pytest.raises(UsageError):
        await ask(found, steps=steps)


def test_of_a_large_swarm_as_many_of_each_stage_are_asked() -> None:
    records = [record_of(f"p{number:03}", stage=0 if number < 90 else 1) for number in range(100)]
    asked = whom_to_ask(LiveView(records=(record_of("me"), *records), me=ME), 2)
    assert len(asked) == MAX_ASKED
    assert sum(record.stage == 1 for record in asked) == 10
    assert ME not in {record.peer for record in asked}


def test_the_longest_reply_fits_a_line_of_the_control_socket() -> None:
    others = [f"12D3KooWGRYZDHBembyGJQqQ6WgLqJWYNjnECJwGBnCg8vbC{number:04}" for number in range(1000)]
    sent = Span(SpanKind.SEND_GRADIENT, 1e6, 1e6 + 99, 10**6, 8191, "", 10**8)
    spans = [Span(SpanKind.COMMIT, 0, 1, 0), *(sent._replace(peer=others[number % 1000]) for number in range(MAX_SPANS_TOLD - 1))]
    timeline = PeerTimeline(peer=others[0], stage=4000, spans=spans)
    reply = trace_reply(first=0, last=1, timelines=[timeline], silent=[], num_not_asked=0, run="r" * 64)
    assert len(json.dumps(reply)) < MAX_LINE_BYTES
