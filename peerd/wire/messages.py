"""The values that peers exchange, in the form that the rest of peerd uses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from peerd.config.access import RawList
from peerd.config.codec import NONE, Allowed, Codec
from peerd.errors import BadMessageError
from peerd.link.links import CHUNK_BYTES, Bytes
from peerd.policy.round.debts import Edge
from peerd.policy.step.certificates import Slices, average_id_of
from peerd.policy.step.confirming import RoundProof, SignedOutcome
from peerd.policy.step.receipts import SignedAsk, SignedPass
from peerd.policy.step.roster import Roster
from peerd.table.record import NO_AVERAGE, NO_RECORD, AverageId, Lineage, PeerId, RawRecord

ITEM_BYTES = {"float32": 4, "int32": 4}
RawManifest = tuple[bytes, bytes, bytes]
"""A received manifest, not verified: canonical JSON, the organiser's raw public key, the signature."""


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor as little-endian bytes, raw or encoded, in chunks. Decode it only off the event loop."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Bytes, ...]
    codec: Codec = NONE

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in its encoded form."""
        return self.codec.num_bytes(self.num_values) if self.codec.is_lossy else ITEM_BYTES[self.dtype] * self.num_values

    def with_chunks(self, chunks: tuple[Bytes, ...]) -> TensorBytes:
        return replace(self, chunks=chunks)

    def check(self, dtype: str, shape: tuple[int, ...], allowed: Allowed | None = None) -> None:
        """Raise BadMessageError unless dtype, shape and codec are as expected. Without `allowed` any codec is accepted."""
        if (self.dtype, self.shape) != (dtype, shape):
            raise BadMessageError(f"a tensor of {self.dtype}{list(self.shape)} where {dtype}{list(shape)} is due")
        if allowed is not None and not allowed.permits(self.codec):
            raise BadMessageError(f"a tensor encoded as {self.codec} where {allowed} is due")


def chunks_of(tensors: Iterable[TensorBytes]) -> Iterator[bytes]:
    """The bytes of tensors, one after another, in chunks that fit into a message."""
    for piece in (piece for each in tensors for piece in each.chunks):
        for first in range(0, len(piece), CHUNK_BYTES):
            yield bytes(piece[first : first + CHUNK_BYTES])


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request to one stage to compute one microbatch."""

    stage: int
    step: int
    index: int
    accumulate: frozenset[int]
    inputs: TensorBytes
    labels: TensorBytes
    call_id: bytes = b""
    """The dispatcher gives each attempt its own, so that CANCEL of a failed attempt never calls off a later one."""
    evaluation: bool = False
    """Forward only, with the parameters of `step`. The reply is the loss."""
    path: dict[int, PeerId] = field(default_factory=dict)
    """By later stage, the peer that computed this microbatch before. A retry prefers it."""
    attempt: int = 0
    """Number of times that the trainer has launched it before. Each launch takes another path."""
    again: bool = False
    """A call for this microbatch was or may have been made before, so another peer may have added it too."""
    gradient_codec: Codec | None = None
    """The codec for the gradient in the reply, where the run chooses codecs for each link."""
    versions: tuple[bytes, ...] = ()
    """Where steps are local, by earlier stage, the name of the version of its parameters that made the inputs."""
    signature: bytes = b""
    """Where peers audit each other, the caller's signature of what it asks (policy/step/receipts.py)."""
    above: SignedAsk | None = None
    """The call that the caller got itself; None at the first stage."""
    lineage: bytes = b""
    """The hash of that of the parameters with which the caller made the inputs."""
    trace: bytes = b""
    """OpenTelemetry's trace id and the id of the caller's span; empty except for a sample of the calls."""

    @property
    def needs_backward(self) -> bool:
        """True if a gradient passes back through this stage, because this or an earlier stage has to add it."""
        return any(stage <= self.stage for stage in self.accumulate)

    @property
    def needs_gradient(self) -> bool:
        """True if the caller needs the gradient of the inputs, because an earlier stage has to add it."""
        return any(stage < self.stage for stage in self.accumulate)

    @property
    def asks_gradient_only(self) -> bool:
        """True if only earlier stages have to add it. Then a peer that has computed the microbatch before can answer from memory."""
        return bool(self.accumulate) and max(self.accumulate) < self.stage


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """The reply to a call: the gradient of the inputs (None where it is not needed) or an evaluation's loss, and the path's records."""

    gradient: TensorBytes | None
    downstream_s: float
    """Time for which the callee waited for later stages."""
    records: tuple[RawRecord, ...]
    loss: float | None = None
    held_s: float = 0.0
    """Time for which the microbatch was computed or queued, at the callee and in all later stages: all but the time in transit."""
    slots: int = 0
    """The smallest number of slots of a peer on the path; 0 where unknown."""
    versions: tuple[bytes, ...] = ()
    """Where steps are local, of the callee and each later stage, the name of the version that the gradient was computed with."""
    signed: SignedPass | None = None
    """Where peers audit each other, what the callee has signed of this call."""
    ledger: bytes = b""
    """At the callee, the name of its ledger that has the gradients; empty: none has. It travels in what is signed alone."""


class ProposalAnswer(NamedTuple):
    """What a member says to a proposal."""

    joined: bool
    reason: str = ""
    """Why it did not join."""
    record: RawRecord = NO_RECORD
    """Its present record, where it did not join."""
    preparing: bool = False
    """It joins once what it computes now is done. The leader asks again."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A chunk of a round, on its way to one member. Members are numbered by their places in the roster."""

    slice: int
    """The member that reduces it."""
    author: int
    """Whose part it is; the reducer itself: the sum."""
    number: int
    """Of the chunk in its slice."""
    to: int
    """The member that is to have it: not the receiver where a mate carries it."""
    signature: bytes = b""
    """The author's, where a mate carries it."""
    slice_signature: bytes = b""
    """With the last chunk of a sum, where the run certifies: the reducer's signature of its whole slice."""
    chunks: tuple[Bytes, ...] = ()

    @property
    def is_sum(self) -> bool:
        return self.author == self.slice

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.chunks))


@dataclass(frozen=True, slots=True)
class Carried:
    """How far what a mate carries over one edge has come. Counts of chunks."""

    source: int
    target: int
    here: int
    """Of the source's part: at the mate."""
    part: int
    """Of the source's part: at the target."""
    sum: int
    """Of the source's sum: at the target."""
    summed: int
    """Of the target's slice: it has every member's part of them."""


@dataclass(frozen=True, slots=True)
class Verified:
    """How many chunks a receiver has verified, as it tells their sender."""

    part: int = 0
    """Of the sender's part of the slice that the receiver reduces."""
    sum: int = 0
    """Of the sum that the sender reduces."""
    summed: int = 0
    """Of the receiver's own slice: it has every member's part of them."""
    carried: tuple[Carried, ...] = ()


class PlacedSlice(NamedTuple):
    """A signed slice of a round, by the place of its reducer."""

    member: int
    root: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class OutcomeWord:
    """What came of a round at one of its members (`SignedOutcome`), by the places of its members."""

    member: int
    average_id: AverageId
    signature: bytes
    slices: tuple[PlacedSlice, ...] = ()


@dataclass(frozen=True, slots=True)
class Beat:
    """What one member of a round has, as it tells another."""

    average_id: AverageId
    parts: tuple[int, ...]
    """By author: how many chunks of its part of this member's slice are here."""
    sums: tuple[int, ...]
    """By reducer: how many chunks of its sum are here."""
    still_s: float
    """For how long nothing of the round has moved anywhere, as far as this member knows."""
    given_parts: tuple[int, ...] = ()
    """By reducer: how many chunks of this member's part it has, as far as it has told."""
    given_sums: tuple[int, ...] = ()
    """By member: how many chunks of this member's sum it has."""
    carriers: Mapping[Edge, int] = field(default_factory=dict)
    """The leader's: which mate carries what does not pass."""
    carried: Mapping[Edge, int] = field(default_factory=dict)
    """A mate's: how many chunks of the source's part are here."""
    words: tuple[OutcomeWord, ...] = ()
    """What came of the round, as members have signed it: those words that the other may not know."""
    heard: int = 0
    """The members whose words are here, as bits."""


@dataclass(frozen=True, slots=True)
class Average:
    """The header of an averaged gradient (the sum over the step, not yet divided). The roster proves that it is exact."""

    roster: Roster
    lineage: Lineage
    """The lineage of the parameters that the gradients were computed with."""
    num_bytes: int
    tied_sum: AverageId = NO_AVERAGE
    """The id of a tied weight's gradient sum, which follows the average; none where the step is not finished."""
    norm: float | None = None
    """The gradient norm with which it was applied; None where the step is not finished, or the run shares no norms."""
    chunk_hashes: tuple[bytes, ...] = ()
    slices: Slices = ()
    """As its reducers signed them, where the run certifies."""
    outcomes: tuple[SignedOutcome, ...] = ()
    """Of a section, where the run certifies: the words of the members of its round that say that this came of it."""
    sections: tuple[RoundProof, ...] = ()
    """Of an average that was made by sections, where the run certifies: what proves each of them."""

    @property
    def id(self) -> AverageId:
        """With the numbers, where the run certifies; otherwise that of its round."""
        return average_id_of(self.roster, self.slices)

    @property
    def proof(self) -> RoundProof:
        """What proves it, if it is a section."""
        return RoundProof(self.roster, self.slices, self.outcomes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The header of an immutable copy of a stage's state, which is one safetensors file."""

    step: int
    lineage: Lineage
    num_bytes: int
    chunk_hashes: tuple[bytes, ...]
    metadata: str
    previous_bytes: int = 0
    """Of the bytes, the last so many are a file of their own, with the parameters of the step before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRequest:
    """Which snapshot a joiner wants: the newest, or the one of `step` with this identity (`identity_of` its chunks' hashes)."""

    stage: int
    snapshot: bytes = b""
    step: int = 0
    tied_only: bool = False


SKETCH_SEED_BYTES, MOST_SKETCH_BYTES = 32, 1 << 21


@dataclass(frozen=True, slots=True)
class ToldSketch:
    """The sketch of the state that a peer holds at a step."""

    step: int
    sums: bytes


@dataclass(frozen=True, slots=True)
class Description:
    """What a peer tells about itself to any caller."""

    manifests: tuple[RawManifest, ...]
    software: str
    clock_s: float
    access: RawList | None = None
    """The list of who may take part, not verified; None: its organiser has made none."""


@dataclass(frozen=True, slots=True)
class DialBack:
    """The result of a peer's attempt to dial back."""

    observed: str
    """The IPv4 address of this peer as the other one sees it; empty where it cannot tell."""
    reached: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of a speed measurement: the bytes that came after the first piece, and the seconds that they took."""

    num_bytes: int
    took_s: float


MOST_TOLD_BYTES = 1 << 18
"""Bytes of moves that a peer tells at once."""


@dataclass(frozen=True, slots=True)
class ToldMoves:
    """A part of a peer's log of what it has done to its own parameters, where steps are local."""

    incarnation: int = 0
    """Its incarnation when it began the log; 0: it has none."""
    first: int = 0
    """The number of the first move."""
    lines: bytes = b""
