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

from peerd.daemon.node import Node
from peerd.wire.messages import Call

if TYPE_CHECKING:
    from peerd.observe.otel import Tracer

LOG = structlog.get_logger()


class MicrobatchTraces:
    """What surrounds a microbatch where it is launched and where it is served."""

    def __init__(self, tracer: Tracer, node: Node) -> None:
        self._tracer = tracer
        self._node = node

    @contextlib.contextmanager
    def launched(self, call: Call) -> Iterator[Call]:
        if call.index != sampled_of(call.step, self._node.place.manifest.train.microbatches_per_step):
            yield call
            return
        with self._tracer.root("microbatch", self._about(call)) as trace:
            yield replace(call, trace=trace)

    @contextlib.contextmanager
    def served(self, call: Call) -> Iterator[Call]:
        if not call.trace:
            yield call
            return
        began_s = time.monotonic()
        about = {**self._about(call), "peerd.stage": call.stage, "peerd.peer": self._node.membership.me}
        with self._tracer.child(call.trace, f"stage {call.stage}", about) as (trace, span):
            try:
                yield replace(call, trace=trace)
            finally:
                done = self._node.spans.of_microbatch(call.step, call.index, began_s)
                self._tracer.add(span, [each for each in done if each.began_s >= began_s])

    def _about(self, call: Call) -> dict[str, str | int]:
        return {"peerd.step": call.step, "peerd.microbatch": call.index}


def sampled_of(step: int, microbatches_per_step: int) -> int:
    """The one microbatch of a step that is traced."""
    return step % microbatches_per_step


class OpenTelemetry:
    """Runs for as long as the daemon; `attach` gives it the stage served now."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None
        self._node: Node | None = None

    def attach(self, node: Node) -> None:
        self._node = node
        self._hook()

    async def run(self) -> None:
        """Until cancelled. Whatever goes wrong with it costs the traces only."""
        try:
            otel = await asyncio.to_thread(importlib.import_module, "peerd.observe.otel")
            assert self._node is not None
            tracer: Tracer = await asyncio.to_thread(otel.tracer, self._node.membership.me, self._node.place.signed.run)
        except Exception as error:  # the edge of what only looks
            LOG.warning("no OpenTelemetry", error=str(error))
            return
        self._tracer = tracer
        self._hook()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(tracer.close)

    def _hook(self) -> None:
        if self._tracer is None or self._node is None:
            return
        traces = MicrobatchTraces(self._tracer, self._node)
        self._node.service.tracing = traces.served
        if self._node.trainer is not None:
            self._node.trainer.tracing = traces.launched
