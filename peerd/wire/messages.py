"""The values that cross the wire, as the rest of peerd knows them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from peerd.config.codec import NONE, Allowed, Codec
from peerd.errors import BadMessageError
from peerd.link.links import Bytes
from peerd.policy.step.roster import Roster
from peerd.table.record import NO_AVERAGE, AverageId, Lineage, PeerId, RawRecord

ITEM_BYTES = {"float32": 4, "int32": 4}


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor as little-endian bytes, raw or encoded, cut into chunks; turned into a tensor only off the event loop."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Bytes, ...]
    codec: Codec = NONE

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """As they travel."""
        return self.codec.num_bytes(self.num_values) if self.codec.is_lossy else ITEM_BYTES[self.dtype] * self.num_values

    def with_chunks(self, chunks: tuple[Bytes, ...]) -> TensorBytes:
        return replace(self, chunks=chunks)

    def check(self, dtype: str, shape: tuple[int, ...], allowed: Allowed | None = None) -> None:
        """BadMessageError unless this is exactly what the stage takes; without `allowed` any codec will do."""
        if (self.dtype, self.shape) != (dtype, shape):
            raise BadMessageError(f"a tensor of {self.dtype}{list(self.shape)} where {dtype}{list(shape)} is due")
        if allowed is not None and not allowed.permits(self.codec):
            raise BadMessageError(f"a tensor encoded as {self.codec} where {allowed} is due")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One microbatch at the door of one stage."""

    call_id: bytes
    stage: int
    step: int
    index: int
    accumulate: frozenset[int]
    inputs: TensorBytes
    labels: TensorBytes
    evaluation: bool = False
    """Forward only, with the parameters of `step`: the reply is the loss."""
    path: dict[int, PeerId] = field(default_factory=dict)
    """Which peer of a later stage has had this microbatch before: a retry prefers it."""
    attempt: int = 0
    """How many times its trainer has launched it before: another way is taken each time."""
    gradient_codec: Codec | None = None
    """What the gradient shall come back as, where the run leaves that to each link."""
    trace: bytes = b""
    """OpenTelemetry's trace and the caller's span in it; empty for all but a sample."""

    @property
    def needs_backward(self) -> bool:
        """A gradient passes back through this stage: it shall be added here, or at a stage before."""
        return any(stage <= self.stage for stage in self.accumulate)

    @property
    def needs_gradient(self) -> bool:
        """And on to the caller."""
        return any(stage < self.stage for stage in self.accumulate)

    @property
    def asks_gradient_only(self) -> bool:
        """All stages that shall add it lie before this one: whoever has done it knows the answer."""
        return bool(self.accumulate) and max(self.accumulate) < self.stage


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """What comes back: the gradient of the inputs (None where nobody needs it), or an evaluation's loss; and the records of the path."""

    gradient: TensorBytes | None
    downstream_s: float
    """How long the callee waited for later stages."""
    queued_s: float
    """How long the microbatch waited for its turn at the callee."""
    records: tuple[RawRecord, ...]
    loss: float | None = None
    held_s: float = 0.0
    """How long it was computed or waited its turn, at the callee and at every peer below: all but its time on the way."""
    slots: int = 0
    """Microbatches that a peer may hold at once, the fewest on the path; 0: not told."""


@dataclass(frozen=True, slots=True)
class Part:
    """Announces one member's part of the slice that the callee reduces."""

    average_id: AverageId
    slice_index: int
    ledger: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Average:
    """An averaged gradient (the sum over the step, not yet divided), provable by its roster."""

    roster: Roster
    lineage: Lineage
    """Of the parameters whose gradients these are."""
    num_bytes: int
    tied_sum: AverageId = NO_AVERAGE
    """Of a tied weight's gradients over both stages, which come after it; none where the step is not finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What describes an immutable copy of a stage's state as one safetensors file."""

    step: int
    lineage: Lineage
    num_bytes: int
    chunk_hashes: tuple[bytes, ...]
    metadata: str


@dataclass(frozen=True, slots=True)
class RawManifest:
    """A manifest as it travels: canonical JSON, the organiser's raw public key, the signature. Not verified yet."""

    body: bytes
    organiser_key: bytes
    signature: bytes


@dataclass(frozen=True, slots=True)
class Description:
    """What a peer says about itself to anybody."""

    manifests: tuple[RawManifest, ...]
    software: str
    clock_s: float


@dataclass(frozen=True, slots=True)
class DialBack:
    """What a peer found that was asked to dial back."""

    observed: str
    """The caller's IPv4 address as that peer sees it; empty where it cannot tell."""
    reached: bool


@dataclass(frozen=True, slots=True)
class Speed:
    """So many bytes came in so many seconds after the first ones."""

    num_bytes: int
    took_s: float
