"""Bytes that this daemon has sent and received, by what they are and to whom; how fast they travel on each link."""

from __future__ import annotations

import enum
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message as ProtoMessage

from peerd.config.codec import NONE, Codec
from peerd.policy.route.compressing import RateMeter
from peerd.table.record import PeerId

Reply = TypeVar("Reply", bound=ProtoMessage)


class PeerRole(enum.StrEnum):
    """What the peer at the other end of a transfer is to this one."""

    TRAINER = "trainer"
    """Launched the microbatch that is served here."""
    PREVIOUS_STAGE = "previous_stage"
    NEXT_STAGE = "next_stage"
    """Of a trainer: stage 0."""
    STAGE_PEER = "stage_peer"
    """Averages with this one."""
    DONOR = "donor"
    """Has what is downloaded."""
    RECIPIENT = "recipient"
    """Downloads what is here."""


class Way(enum.StrEnum):
    """How tensors come to a peer."""

    DIRECT = "direct"
    TUNNEL = "tunnel"


Link = tuple[PeerId, Way]
"""What has a rate: each way to a peer its own."""


@dataclass(slots=True)
class Traffic:
    """Bytes of RPC payload this daemon has sent and received, tensors and messages alike."""

    sent_bytes: int = 0
    received_bytes: int = 0
    boundary_bytes: int = 0
    boundary_crossings: int = 0
    tensors: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    """Bytes of tensors and files by what they are, their codec, the role of the peer at the other end, and sent or received."""
    incoming: defaultdict[Link, RateMeter] = field(default_factory=lambda: defaultdict(RateMeter))
    """How fast tensors come in, by the peer that sends them and the way they take."""
    outgoing: dict[Link, float] = field(default_factory=dict)
    """Bytes per second at which mine arrive, by the peer that measured and told it and the way they took."""
    taken: dict[PeerId, Way] = field(default_factory=dict)
    """By which way the last microbatch went to each peer."""

    def sent(self, what: str, role: PeerRole, num_bytes: int, codec: Codec = NONE) -> None:
        self.tensors[what, str(codec), role, "sent"] += num_bytes

    def received(self, what: str, role: PeerRole, num_bytes: int, codec: Codec = NONE) -> None:
        self.tensors[what, str(codec), role, "received"] += num_bytes

    def gave(self, what: str, role: PeerRole, num_bytes: int) -> None:
        """Part of a download from here, which is nothing but these bytes."""
        self.sent_bytes += num_bytes
        self.sent(what, role, num_bytes)

    def took(self, what: str, role: PeerRole, num_bytes: int) -> None:
        """Part of a download to here."""
        self.received_bytes += num_bytes
        self.received(what, role, num_bytes)

    def answered(self, request: ProtoMessage, reply: Reply) -> Reply:
        """Counts both, and gives the reply."""
        self.received_bytes += request.ByteSize()
        self.sent_bytes += reply.ByteSize()
        return reply

    @contextmanager
    def receiving(self, link: Link, num_bytes: int) -> Iterator[None]:
        """So many bytes of tensors are on their way over `link`; the first word of them has come."""
        meter = self.incoming[link]
        meter.begin(time.monotonic())
        arrived = 0
        try:
            yield
            arrived = num_bytes
        finally:
            meter.end(arrived, time.monotonic())

    def told(self, link: Link, rate: float) -> None:
        """The peer says how fast my tensors come in over it; 0 where it does not know yet."""
        if math.isfinite(rate) and rate > 0:
            self.outgoing[link] = rate

    def rates(self, peer: PeerId, way: Way | None = None) -> tuple[float | None, float | None]:
        """Bytes per second to the peer and from it, by this way or that of the last microbatch; None: not known."""
        link = peer, way or self.taken.get(peer, Way.TUNNEL)
        meter = self.incoming.get(link)
        return self.outgoing.get(link), meter.rate if meter is not None else None

    def forget(self, peer: PeerId) -> None:
        self.taken.pop(peer, None)
        for way in Way:
            self.forget_way(peer, way)

    def forget_way(self, peer: PeerId, way: Way) -> None:
        self.outgoing.pop((peer, way), None)
        self.incoming.pop((peer, way), None)
