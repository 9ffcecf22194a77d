"""Which microbatches are traced, and where: the daemon's hooks for OpenTelemetry. Off unless asked for.

Of each step one microbatch is traced, another one each step. Whoever launches it begins the trace; its id travels with the
call, so the spans of all daemons on the way that export join into one. A daemon that exports nothing passes it on.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from peerd.table.record import PeerId, RunId
from peerd.timeline.spans import SpanRing
from peerd.wire.call_tracing import CallTracing
from peerd.wire.messages import Call

if TYPE_CHECKING:
    from peerd.observe.otel import Tracer

LOG = structlog.get_logger()


class MicrobatchTraces(CallTracing):
    """What surrounds a microbatch where it is launched and where it is served."""

    def __init__(self, spans: SpanRing, me: PeerId, microbatches_per_step: int) -> None:
        self._spans = spans
        self._me = me
        self._microbatches_per_step = microbatches_per_step
        self._tracer: Tracer | None = None

    def begin(self, tracer: Tracer) -> None:
        """Trace from now on; until then calls go on as they are."""
        self._tracer = tracer

    @contextlib.contextmanager
    def launched(self, call: Call) -> Iterator[Call]:
        if self._tracer is None or call.index != sampled_of(call.step, self._microbatches_per_step):
            yield call
            return
        with self._tracer.root("microbatch", self._about(call)) as trace:
            yield replace(call, trace=trace)

    @contextlib.contextmanager
    def served(self, call: Call) -> Iterator[Call]:
        if self._tracer is None or not call.trace:
            yield call
            return
        began_s = time.monotonic()
        about = {**self._about(call), "peerd.stage": call.stage, "peerd.peer": self._me}
        with self._tracer.child(call.trace, f"stage {call.stage}", about) as (trace, span):
            try:
                yield replace(call, trace=trace)
            finally:
                done = self._spans.of_microbatch(call.step, call.index, began_s)
                self._tracer.add(span, [each for each in done if each.began_s >= began_s])

    def _about(self, call: Call) -> dict[str, str | int]:
        return {"peerd.step": call.step, "peerd.microbatch": call.index}


def sampled_of(step: int, microbatches_per_step: int) -> int:
    """The one microbatch of a step that is traced."""
    return step % microbatches_per_step


class OpenTelemetry:
    """Runs for as long as the daemon."""

    def __init__(self, traces: MicrobatchTraces, peer: PeerId, run: RunId) -> None:
        self._traces = traces
        self._peer = peer
        self._run = run

    async def run(self) -> None:
        """Until cancelled. Whatever goes wrong with it costs the traces only."""
        try:
            otel = await asyncio.to_thread(importlib.import_module, "peerd.observe.otel")
            tracer: Tracer = await asyncio.to_thread(otel.tracer, self._peer, self._run)
        except Exception as error:  # the edge of what only looks
            LOG.warning("no OpenTelemetry", error=str(error))
            return
        self._traces.begin(tracer)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(tracer.close)
