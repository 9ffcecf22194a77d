"""Converts between spans and the columns of a TimelineReply, and checks replies from the network."""

from __future__ import annotations

import math
from collections.abc import Sequence

from peerd.errors import BadMessageError
from peerd.generated import swarm_pb2
from peerd.timeline.spans import MAX_SPANS, Span, SpanKind
from peerd.wire.convert import MAX_COUNT, MAX_PEER_CHARS

MAX_OTHERS = 4096
MAX_TOOK_S = 1e6
_KINDS = {kind.value: kind for kind in SpanKind}


def spans_to(spans: Sequence[Span], complete: bool) -> swarm_pb2.TimelineReply:
    """Return a reply without the clock, which is read just before the reply is sent."""
    others = {peer: number for number, peer in enumerate(sorted({span.peer for span in spans if span.peer})[:MAX_OTHERS], start=1)}
    return swarm_pb2.TimelineReply(
        complete=complete,
        peers=list(others),
        kinds=bytes(span.kind for span in spans),
        began_s=[span.began_s for span in spans],
        took_s=[span.ended_s - span.began_s for span in spans],
        steps=[span.step for span in spans],
        microbatches=[span.microbatch for span in spans],
        other=[others.get(span.peer, 0) for span in spans],
        num_bytes=[span.num_bytes for span in spans],
    )


def spans_from(reply: swarm_pb2.TimelineReply) -> list[Span]:
    """Return the spans of a reply. Raises BadMessageError unless all columns have the same length and every value is possible."""
    columns = (reply.began_s, reply.took_s, reply.steps, reply.microbatches, reply.other, reply.num_bytes)
    count = len(reply.kinds)
    if count > MAX_SPANS or any(len(column) != count for column in columns):
        raise BadMessageError("the columns of the timeline are too long or differ in length")
    if len(reply.peers) > MAX_OTHERS or any(len(peer) > MAX_PEER_CHARS or not peer.isalnum() for peer in reply.peers):
        raise BadMessageError("the timeline has too many or invalid peer ids")
    names = ["", *reply.peers]
    if not set(reply.kinds) <= _KINDS.keys() or max(reply.other, default=0) >= len(names):
        raise BadMessageError("the timeline has an unknown kind or peer")
    if not all(map(math.isfinite, reply.began_s)) or not all(0 <= took_s < MAX_TOOK_S for took_s in reply.took_s):
        raise BadMessageError("the timeline has impossible times")
    if max((*reply.steps, *reply.num_bytes), default=0) > MAX_COUNT or min(reply.microbatches, default=0) < -1:
        raise BadMessageError("the timeline has numbers out of range")
    return [
        Span(_KINDS[kind], began_s, began_s + took_s, step, index, names[other], num_bytes)
        for kind, began_s, took_s, step, index, other, num_bytes in zip(reply.kinds, *columns, strict=True)
    ]
