"""Notes in the timeline how long each phase of a step took."""

from __future__ import annotations

import time

from peerd.table.record import Phase
from peerd.timeline.spans import SpanKind, SpanRing

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
