"""Notes in the timeline how long each phase of a step took, and what a device computes at its end."""

from __future__ import annotations

import time

from peerd.table.record import Phase
from peerd.timeline.spans import Span, SpanKind, SpanRing
from peerd.transfers import DeviceTime

_KINDS = {Phase.ACCUMULATING: SpanKind.ACCUMULATING, Phase.AVERAGING: SpanKind.AVERAGING, Phase.AVERAGED: SpanKind.AVERAGED}


class PhaseSpans:
    """The phases of one stage at this peer. Joining is left out: it is no part of a step."""

    def __init__(self, spans: SpanRing, step: int) -> None:
        self._spans = spans
        self._since: tuple[float, int] = (time.monotonic(), step)
        """When the present phase began, and the step that it belongs to."""

    def ended(self, phase: Phase, step: int) -> None:
        """The present phase, which was `phase`, ends now. The next one belongs to `step`."""
        (since_s, step_then), self._since = self._since, (time.monotonic(), step)
        kind = _KINDS.get(phase)
        if kind is not None:
            self._spans.add(kind, since_s, step_then)


class UpdateSpans:
    """The spans of updates. A device makes an update after the thread has gone on, so they are noted once that is seen to be done."""

    def __init__(self, spans: SpanRing) -> None:
        self._spans = spans
        self._given: list[tuple[SpanKind, int, DeviceTime]] = []
        self._last_s = 0.0
        """When the last one ended."""

    def end(self, kind: SpanKind, step: int, took: DeviceTime) -> None:
        """This work of an update ends here."""
        took.end()
        self._given.append((kind, step, took))
        self.look()

    def look(self) -> None:
        """Note what the device has done. Nothing is waited for."""
        while self._given and self._given[0][2].is_over:
            kind, step, took = self._given.pop(0)
            began_s = max(took.began_s, self._last_s)  # a device does one after another
            self._last_s = began_s + took.seconds()
            self._spans.put(Span(kind, began_s, self._last_s, step))
