"""A span is one thing a peer did from one moment to another; the ring keeps a peer's last ones.

Always on: adding a span costs one to three microseconds, and a microbatch makes about ten at each stage.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_SPANS = 32_768
"""Of some 200 bytes each, 7 MB in all: the last 3,000 microbatches."""


class Kind(enum.IntEnum):
    """What was done. The numbers travel: never give one another meaning."""

    FORWARD = 1
    RECOMPUTE = 2
    BACKWARD = 3
    OPTIMIZER = 4
    COMMIT = 5
    """The rest of a commit but for the optimizer."""
    QUEUED = 6
    """A microbatch waits for the compute thread."""
    BELOW = 7
    """A microbatch waits for the gradient from the next stage: its wire and compute included."""
    SEND = 8
    """Tokens or activations go out."""
    RECEIVE = 9
    SEND_GRADIENT = 10
    RECEIVE_GRADIENT = 11
    EXCHANGE = 12
    """One slice of an average: my part goes out, the reduced slice comes in; waiting for the others' parts included."""
    ACCUMULATING = 13
    AVERAGING = 14
    AVERAGED = 15
    """Waits until every stage has averaged."""


COMPUTE = frozenset({Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD})
WIRE = frozenset({Kind.SEND, Kind.RECEIVE, Kind.SEND_GRADIENT, Kind.RECEIVE_GRADIENT})
UPDATE = frozenset({Kind.OPTIMIZER, Kind.COMMIT})
STEP_END = frozenset({Kind.AVERAGING, Kind.AVERAGED}) | UPDATE
PHASES = frozenset({Kind.ACCUMULATING, Kind.AVERAGING, Kind.AVERAGED})


class Span(NamedTuple):
    """Times are of the peer's own monotonic clock, seconds."""

    kind: Kind
    began_s: float
    ended_s: float
    step: int
    microbatch: int = -1
    """-1 where it is about none."""
    peer: str = ""
    """The other end, for what crosses the wire."""
    num_bytes: int = 0


class SpanRing:
    """The last spans of one peer. Any thread may add: an append is one operation of the interpreter."""

    def __init__(self, most: int = MAX_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self.spent_s: dict[Kind, float] = dict.fromkeys(Kind, 0.0)
        """In all, forgotten ones too. Each kind is added by one thread only."""

    def add(self, kind: Kind, began_s: float, step: int, microbatch: int = -1, peer: str = "", num_bytes: int = 0) -> None:
        """What began then and ends now."""
        self.put(Span(kind, began_s, time.monotonic(), step, microbatch, peer, num_bytes))

    def put(self, span: Span) -> None:
        self._spans.append(span)
        self.spent_s[span.kind] += span.ended_s - span.began_s

    def of_steps(self, first: int, last: int, most: int) -> tuple[list[Span], bool]:
        """The newest `most` spans of these steps, in order of their ends, and whether those are all there were."""
        known = list(self._spans)  # one call that no other thread can interrupt
        wanted = [span for span in known if first <= span.step <= last]
        forgotten = 0 < len(known) == self._spans.maxlen and known[0].step >= first
        return wanted[-most:] if most else [], not forgotten and len(wanted) <= most

    def of_microbatch(self, step: int, microbatch: int, since_s: float) -> list[Span]:
        """Its spans that ended after `since_s`, in order."""
        found: list[Span] = []
        for span in reversed(list(self._spans)):
            if span.ended_s < since_s:
                break
            if (span.step, span.microbatch) == (step, microbatch):
                found.append(span)
        return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTimeline:
    """What one peer did, on whichever clock."""

    peer: str
    stage: int
    spans: Sequence[Span]
    complete: bool = True
    """False where the peer had forgotten the earliest, or had more than it could tell."""
    offset_s: float = 0.0
    """What was added to the peer's clock to make it the asker's."""
    offset_error_s: float = 0.0
    """The true offset is no further than this from the estimate: half the round trip."""
