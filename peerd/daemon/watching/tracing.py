"""The verb trace: waits for some steps to end, then brings together what all peers did in them.

Every peer keeps its own last spans; here they are asked for, over the wire, and put on this peer's clock. The clocks need
not agree: a peer tells what its clock shows, and that was somewhen between my asking and its answer having arrived.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

from peerd.control.protocol import SCHEMA, TraceReply
from peerd.control.server import Say, Verb
from peerd.daemon.peer import Peer
from peerd.daemon.watching.history import number_in
from peerd.errors import RemoteError, TimedOutError, UsageError
from peerd.link.links import with_time_for
from peerd.table.record import PeerRecord
from peerd.table.view import LiveView
from peerd.timeline.spans import MAX_SPANS, PeerTimeline, Span
from peerd.wire.swarm_client import ReceivedTimeline

MAX_STEPS = 1000
MAX_ASKED = 64
MAX_SPANS_TOLD = 60_000
"""In one reply, which has to fit a line of the control socket."""
MAX_WAIT_S = 24 * 3600.0
ASK_TIMEOUT_S = 5.0
SPAN_BYTES = 32
"""About the size of a span in a peer's answer, which has the time for all of them as well."""
PROBES = 8
"""Short calls before the long one: the quickest tells most about the clock."""
OTHERS_FOLLOW_WITHIN_S = 2.0
SAY_EVERY_S = 5.0


class Tracing:
    """One daemon's view on what all do."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer

    def verbs(self) -> dict[str, Verb]:
        return {"trace": self.trace}

    async def trace(self, request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
        num_steps = number_in(request, "steps", 1)
        if not 1 <= num_steps <= MAX_STEPS:
            raise UsageError(f"trace takes 1 to {MAX_STEPS} steps")
        first, last = await self._wait(num_steps, float(request.get("timeout_s", 60.0)), say)
        live = self._peer.membership.live()
        asked = whom_to_ask(live, self._peer.place.manifest.train.num_stages)
        most = min(MAX_SPANS, MAX_SPANS_TOLD // (len(asked) + 1))
        answers = await asyncio.gather(*(self._ask(record, (first, last), most) for record in asked))
        return await asyncio.to_thread(  # they are tens of thousands
            trace_reply,
            first=first,
            last=last,
            timelines=[self._own(first, last, most), *(answer for answer in answers if isinstance(answer, PeerTimeline))],
            silent=[(record.peer, record.stage, answer) for record, answer in zip(asked, answers, strict=True) if isinstance(answer, str)],
            num_not_asked=len(live.records) - 1 - len(asked),
            run=self._peer.place.manifest.name,
        )

    async def _wait(self, num_steps: int, timeout_s: float, say: Say) -> tuple[int, int]:
        """The step under way and those after it, once they are over; of a run that has ended, the last ones."""
        peer = self._peer
        began_s, said_s = time.monotonic(), time.monotonic()
        first, end = peer.seat.state.record.step, peer.place.manifest.train.steps
        if end:
            first = max(0, min(first, end - num_steps))
        last = first + num_steps - 1
        while peer.seat.state.record.step <= last:
            if time.monotonic() - began_s > min(timeout_s, MAX_WAIT_S):
                done = f"this peer is at step {peer.seat.state.record.step}, waiting for {last + 1}"
                raise TimedOutError(done, "ask for fewer --steps, wait longer with --timeout, or look at `peerd status`")
            if time.monotonic() - said_s > SAY_EVERY_S:
                said_s = time.monotonic()
                say(f"step {peer.seat.state.record.step} of {first} to {last}")
            await peer.membership.changed(1.0)
        deadline_s = time.monotonic() + OTHERS_FOLLOW_WITHIN_S
        while any(record.step <= last for record in peer.membership.live().records) and time.monotonic() < deadline_s:
            await peer.membership.changed(0.2)
        return first, last

    def _own(self, first: int, last: int, most: int) -> PeerTimeline:
        spans, complete = self._peer.spans.of_steps(first, last, most)
        return PeerTimeline(peer=self._peer.membership.me, stage=self._peer.seat.stage, spans=spans, complete=complete)

    async def _ask(self, record: PeerRecord, steps: tuple[int, int], most: int) -> PeerTimeline | str:
        """What the peer did, on this peer's clock; or why it did not tell."""
        client = self._peer.swarm_client
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                probes = [await client.timeline(record.peer, steps, 0, ASK_TIMEOUT_S) for _ in range(PROBES)]
            told = await client.timeline(record.peer, steps, most, with_time_for(ASK_TIMEOUT_S, SPAN_BYTES * most))
        except TimeoutError:
            return f"no answer within {ASK_TIMEOUT_S:g} s"
        except RemoteError as error:
            return error.message
        offset_s, error_s = offset_to(probes)
        spans = await asyncio.to_thread(_moved, told.spans, offset_s)
        return PeerTimeline(
            peer=record.peer, stage=record.stage, spans=spans, complete=told.complete, offset_s=offset_s, offset_error_s=error_s
        )


def _moved(spans: Sequence[Span], offset_s: float) -> list[Span]:
    return [span._replace(began_s=span.began_s + offset_s, ended_s=span.ended_s + offset_s) for span in spans]


def offset_to(probes: Sequence[ReceivedTimeline]) -> tuple[float, float]:
    """What to add to the peer's clock, and how far off that may be: half the shortest round trip (Cristian 1989)."""
    best = min(probes, key=lambda probe: probe.answered_s - probe.asked_s)
    return (best.asked_s + best.answered_s) / 2 - best.clock_s, (best.answered_s - best.asked_s) / 2


def whom_to_ask(live: LiveView, num_stages: int) -> list[PeerRecord]:
    """All others; of a swarm too large for that, as many of each stage."""
    by_stage = [[record for record in live.records if record.stage == stage and record.peer != live.me] for stage in range(num_stages)]
    asked: list[PeerRecord] = []
    for turn in range(max(map(len, by_stage), default=0)):
        asked += [records[turn] for records in by_stage if turn < len(records)]
    return asked[:MAX_ASKED]


def trace_reply(
    *, first: int, last: int, timelines: Sequence[PeerTimeline], silent: Sequence[tuple[str, int, str]], num_not_asked: int, run: str
) -> TraceReply:
    """Times from the first span on, in microseconds."""
    others = {peer: number for number, peer in enumerate(sorted({span.peer for timeline in timelines for span in timeline.spans}))}
    zero_s = min((span.began_s for timeline in timelines for span in timeline.spans), default=0.0)
    return {
        "schema": SCHEMA,
        "run": run,
        "first_step": first,
        "last_step": last,
        "peers": [
            {
                "peer": timeline.peer,
                "stage": timeline.stage,
                "complete": timeline.complete,
                "offset_ms": timeline.offset_s * 1000,
                "offset_error_ms": timeline.offset_error_s * 1000,
                "spans": [_row(span, zero_s, others[span.peer]) for span in timeline.spans],
            }
            for timeline in timelines
        ],
        "silent": [{"peer": peer, "stage": stage, "reason": reason} for peer, stage, reason in silent],
        "not_asked": num_not_asked,
        "others": list(others),
    }


def _row(span: Span, zero_s: float, other: int) -> list[int]:
    began_us, took_us = round((span.began_s - zero_s) * 1e6), round((span.ended_s - span.began_s) * 1e6)
    return [int(span.kind), began_us, took_us, span.step, span.microbatch, other, span.num_bytes]
