"""Converts between protobuf messages and peerd's values. Every field from the network is checked here before any other code sees it.

`..._from` functions raise BadMessageError for fields out of range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from peerd.config.access import RawList
from peerd.config.codec import NONE, Codec, parse_codec
from peerd.config.manifest import MAX_BOUNDARY_BYTES, MAX_MICROBATCHES_PER_STEP
from peerd.errors import BadMessageError
from peerd.generated import averaging_pb2, stage_pb2, state_pb2, swarm_pb2
from peerd.link.links import CHUNK_BYTES, Bytes
from peerd.policy.round.debts import Edge
from peerd.policy.step.contributions import StageTally, Tally
from peerd.policy.swarm.spreading import MOST_TAGS, TAG_BYTES
from peerd.table.forms import bitmap_to
from peerd.table.record import AverageId, Lineage, PeerId, RawRecord
from peerd.wire.chunks import Headed, Pieces
from peerd.wire.messages import (
    ITEM_BYTES,
    Beat,
    Call,
    CallResult,
    Carried,
    Description,
    Frame,
    OutcomeWord,
    PlacedSlice,
    Snapshot,
    TensorBytes,
    Verified,
)

MAX_RECORDS = 64
MAX_STAGES = 4096
MAX_ROSTER = 4096
"""Members of a round. Those of a stage in groups are far fewer; one without groups may be as large."""
MAX_TALLIES = 20_000
MAX_COUNT = 1 << 62
MAX_PEER_CHARS = 64
MAX_CHUNKS = 1 << 20
MAX_LINEAGE_BYTES = 32
"""The most that fits a record. A joiner that took on a longer lineage could not announce itself."""
MAX_SIGNATURE_BYTES = 1024
MAX_STILL_S = 4e6
"""Fits 32 bits as milliseconds."""
ID_BYTES = 16
TRACE_BYTES = 24
# Fields that a message and the value for it have under the same names.
_CALL = ("call_id", "stage", "step", "evaluation", "trace", "attempt", "again", "signature", "lineage")
_TIMES = ("downstream_s", "held_s", "slots")
_FRAME, _VERIFIED = ("slice", "author", "number", "to", "signature", "slice_signature"), ("part", "sum", "summed")
_COUNTED = ("parts", "sums", "given_parts", "given_sums")
_BEAT = ("average_id", *_COUNTED)
_CARRIED = ("source", "target", "here", "part", "sum", "summed")
_RANGE, _COUNTS = ("stage", "first_step", "last_step", "steps"), ("peer", "steps", "microbatches", "tokens")
Copied = TypeVar("Copied")
MOST_WITH_HEADER = 16 * 1024
"""Tokens up to this size (bytes) are sent with the header. Activations never are: their arrival after the header measures the link."""


def records_to(records: Iterable[RawRecord]) -> list[swarm_pb2.SignedRecord]:
    return [swarm_pb2.SignedRecord(body=body, signature=signature) for body, signature in records]


def records_from(messages: Iterable[swarm_pb2.SignedRecord], most: int = MAX_RECORDS) -> tuple[RawRecord, ...]:
    records = tuple((message.body, message.signature) for message in messages)
    if len(records) > most:
        raise BadMessageError(f"{len(records)} records in one message; at most {most} are allowed")
    return records


def tags_to(tags: Iterable[bytes]) -> bytes:
    return b"".join(tags)


def tags_from(joined: bytes) -> frozenset[bytes]:
    if len(joined) % TAG_BYTES or len(joined) > MOST_TAGS * TAG_BYTES:
        raise BadMessageError(f"record tags of {len(joined)} bytes")
    return frozenset(joined[at : at + TAG_BYTES] for at in range(0, len(joined), TAG_BYTES))


def tensor_to(tensor: TensorBytes) -> stage_pb2.TensorHeader:
    codec = str(tensor.codec) if tensor.codec.is_lossy else ""
    return stage_pb2.TensorHeader(shape=tensor.shape, dtype=tensor.dtype, num_bytes=tensor.num_bytes, codec=codec)


def tensor_from(header: stage_pb2.TensorHeader) -> TensorBytes:
    """Return the tensor that a header describes, still without its bytes."""
    if header.dtype not in ITEM_BYTES:
        raise BadMessageError(f"unknown tensor type {header.dtype[:20]!r}")
    if not 1 <= len(header.shape) <= 8 or header.num_bytes > MAX_BOUNDARY_BYTES:
        raise BadMessageError(f"a tensor of {len(header.shape)} dimensions and {header.num_bytes} bytes")
    tensor = TensorBytes(header.dtype, tuple(header.shape), (), _codec_from(header))
    if ITEM_BYTES[header.dtype] * tensor.num_values > MAX_BOUNDARY_BYTES or tensor.num_bytes != header.num_bytes:
        raise BadMessageError(f"{header.num_bytes} bytes do not make {header.dtype}{list(header.shape)}")
    return tensor


def _codec_from(header: stage_pb2.TensorHeader) -> Codec:
    codec = known_codec(header.codec) or NONE
    if codec.is_lossy and header.dtype != "float32":
        raise BadMessageError(f"a tensor of {header.dtype} cannot be encoded as {codec}")
    return codec


def known_codec(name: str) -> Codec | None:
    """Return the codec of this name, None for an empty name. Raises BadMessageError for an unknown one."""
    try:
        return parse_codec(name) if name else None
    except ValueError as error:
        raise BadMessageError(str(error)) from None


def call_to(call: Call, run: str, records: Iterable[RawRecord], receive_rate: float | None = None) -> stage_pb2.CallHeader:
    """`receive_rate`: bytes per second at which tensors come from the callee; None: not measured yet."""
    return _copied(
        stage_pb2.CallHeader,
        call,
        _CALL,
        run=run,
        microbatch=call.index,
        accumulate=sorted(call.accumulate),
        path=[stage_pb2.Hop(stage=stage, peer=peer) for stage, peer in call.path.items()],
        inputs=tensor_to(call.inputs),
        labels=tensor_to(call.labels),
        records=records_to(records),
        gradient_codec=str(call.gradient_codec) if call.gradient_codec else "",
        receive_rate=receive_rate or 0.0,
        versions=call.versions,
    )


def call_from(header: stage_pb2.CallHeader) -> Call:
    """Return the call that a header describes, still without the bytes of its tensors."""
    if len(header.call_id) != ID_BYTES:
        raise BadMessageError("a call id has 16 bytes")
    if header.microbatch >= MAX_MICROBATCHES_PER_STEP or max(len(header.accumulate), len(header.path)) > MAX_STAGES:
        raise BadMessageError("the microbatch, the accumulate set or the path is out of range")
    if len(header.signature) > MAX_SIGNATURE_BYTES:
        raise BadMessageError("the signature of a call is too long")
    if len(header.trace) not in (0, TRACE_BYTES):
        raise BadMessageError(f"a trace context has {TRACE_BYTES} bytes")
    return _copied(
        Call,
        header,
        _CALL,
        index=header.microbatch,
        accumulate=frozenset(header.accumulate),
        inputs=tensor_from(header.inputs),
        labels=tensor_from(header.labels),
        path={hop.stage: PeerId(hop.peer) for hop in header.path},
        gradient_codec=known_codec(header.gradient_codec),
        versions=_versions_from(header.versions),
    )


def _versions_from(names: Sequence[bytes]) -> tuple[bytes, ...]:
    if len(names) > MAX_STAGES or any(len(name) not in (0, ID_BYTES) for name in names):
        raise BadMessageError(f"the name of a version has {ID_BYTES} bytes or none, and there is one for each stage")
    return tuple(names)


def call_messages(header: stage_pb2.CallHeader, call: Call) -> Iterator[stage_pb2.CallMessage | Headed | Pieces]:
    """Yield the messages of a call. A few tokens come with the header. Otherwise the header goes first, so that a full callee can refuse
    before tensors are sent."""
    pieces = (*call.inputs.chunks, *call.labels.chunks)
    opens = stage_pb2.CallMessage(header=header)
    if call.stage == 0 and sum(map(len, pieces)) <= MOST_WITH_HEADER:
        yield Headed(opens, b"".join(pieces))
        return
    yield opens
    yield from grouped(pieces)


def grouped(pieces: Iterable[Bytes]) -> Iterator[Pieces]:
    """Group pieces of at most 1 MB each so that no group exceeds 1 MB."""
    group: list[Bytes] = []
    size = 0
    for piece in pieces:
        if group and size + len(piece) > CHUNK_BYTES:
            yield tuple(group)
            group, size = [], 0
        group.append(piece)
        size += len(piece)
    if group:
        yield tuple(group)


def result_to(result: CallResult, receive_rate: float | None) -> tuple[stage_pb2.ReplyMessage, tuple[Bytes, ...]]:
    """Return the last messages of a call: the result, then the gradient's chunks. `receive_rate`: bytes per second from this caller."""
    done = _copied(stage_pb2.Done, result, _TIMES, records=records_to(result.records), versions=result.versions)
    if receive_rate is not None:
        done.receive_rate = receive_rate
    if result.loss is not None:
        done.loss = result.loss
    if result.gradient is None:
        return stage_pb2.ReplyMessage(done=done), ()
    done.gradient.CopyFrom(tensor_to(result.gradient))
    return stage_pb2.ReplyMessage(done=done), result.gradient.chunks


def result_from(done: stage_pb2.Done, gradient: TensorBytes | None) -> CallResult:
    loss = done.loss if done.HasField("loss") else None
    records, versions = records_from(done.records, MAX_STAGES), _versions_from(done.versions)
    return _copied(CallResult, done, _TIMES, gradient=gradient, records=records, loss=loss, versions=versions)


def id_from(average_id: bytes) -> AverageId:
    if len(average_id) != ID_BYTES:
        raise BadMessageError("the id of a round has 16 bytes")
    return AverageId(average_id)


def frame_to(frame: Frame) -> averaging_pb2.ChunkHeader:
    return _copied(averaging_pb2.ChunkHeader, frame, _FRAME)


def frame_from(header: averaging_pb2.ChunkHeader) -> Frame:
    """A frame without its bytes. Whether such a chunk is due is the round's to check."""
    if max(len(header.signature), len(header.slice_signature)) > MAX_SIGNATURE_BYTES:
        raise BadMessageError("the signature of a chunk is too long")
    return _copied(Frame, header, _FRAME)


def verified_to(held: Verified, average_id: bytes = b"") -> averaging_pb2.Verified:
    carried = [_copied(averaging_pb2.Carried, each, _CARRIED) for each in held.carried]
    return _copied(averaging_pb2.Verified, held, _VERIFIED, average_id=average_id, carried=carried)


def verified_from(message: averaging_pb2.Verified) -> Verified:
    if len(message.carried) > MAX_ROSTER:
        raise BadMessageError(f"{len(message.carried)} edges that one member carries")
    return _copied(Verified, message, _VERIFIED, carried=tuple(_copied(Carried, each, _CARRIED) for each in message.carried))


def beat_to(beat: Beat) -> averaging_pb2.RoundBeat:
    edges = {**beat.carriers, **beat.carried}
    carrying = [
        averaging_pb2.Carrying(source=edge.source, target=edge.target, mate=beat.carriers.get(edge, 0), here=beat.carried.get(edge, 0))
        for edge in edges
    ]
    still_ms = round(1000 * min(beat.still_s, MAX_STILL_S))
    told = {"words": words_to(beat.words), "heard": bitmap_to(beat.heard)}
    return _copied(averaging_pb2.RoundBeat, beat, _BEAT, still_ms=still_ms, carrying=carrying, **told)


def beat_from(message: averaging_pb2.RoundBeat) -> Beat:
    counts = {name: tuple(getattr(message, name)) for name in _COUNTED}
    if max(*map(len, counts.values()), len(message.carrying), len(message.words), 8 * len(message.heard)) > MAX_ROSTER:
        raise BadMessageError("a word about a round with more members than a roster has")
    carriers = {Edge(each.source, each.target): each.mate for each in message.carrying}
    carried = {Edge(each.source, each.target): each.here for each in message.carrying}
    told: dict[str, Any] = {**counts, "words": words_from(message.words), "heard": int.from_bytes(message.heard, "little")}
    return Beat(id_from(message.average_id), still_s=message.still_ms / 1000, carriers=carriers, carried=carried, **told)


def words_to(words: Iterable[OutcomeWord]) -> list[averaging_pb2.Outcome]:
    return [
        averaging_pb2.Outcome(
            member=word.member,
            average_id=word.average_id,
            signature=word.signature,
            slices=[averaging_pb2.SliceRoot(member=each.member, root=each.root, signature=each.signature) for each in word.slices],
        )
        for word in words
    ]


def words_from(messages: Iterable[averaging_pb2.Outcome]) -> tuple[OutcomeWord, ...]:
    """Whether the members are ones of the round is the round's to check."""
    return tuple(
        OutcomeWord(each.member, id_from(each.average_id), short_signature(each.signature), slices_from(each.slices)) for each in messages
    )


def slices_from(slices: Sequence[averaging_pb2.SliceRoot]) -> tuple[PlacedSlice, ...]:
    """The signed slices of one round, in the order of their reducers."""
    members = [each.member for each in slices]
    if members != sorted(set(members)) or len(members) > MAX_ROSTER:
        raise BadMessageError("slices that are not in the order of their reducers")
    if not are_hashes([each.root for each in slices]):
        raise BadMessageError("slices with damaged hashes")
    return tuple(PlacedSlice(each.member, each.root, short_signature(each.signature)) for each in slices)


def short_signature(signature: bytes) -> bytes:
    if len(signature) > MAX_SIGNATURE_BYTES:
        raise BadMessageError("a signature that is too long")
    return signature


def snapshot_to(snapshot: Snapshot) -> state_pb2.StateHeader:
    return state_pb2.StateHeader(
        step=snapshot.step,
        inexact=snapshot.lineage.inexact,
        lineage=snapshot.lineage.chain,
        num_bytes=snapshot.num_bytes,
        chunk_blake3=snapshot.chunk_hashes,
        metadata=snapshot.metadata,
        previous_bytes=snapshot.previous_bytes,
    )


def snapshot_from(header: state_pb2.StateHeader) -> Snapshot:
    hashes = tuple(header.chunk_blake3)
    if not are_hashes(hashes) or len(header.metadata) > 1 << 22 or header.step >= MAX_COUNT or len(header.lineage) > MAX_LINEAGE_BYTES:
        raise BadMessageError("the header of the state is damaged")
    return Snapshot(
        step=header.step,
        lineage=Lineage(header.inexact, header.lineage),
        num_bytes=header.num_bytes,
        chunk_hashes=hashes,
        metadata=header.metadata,
        previous_bytes=header.previous_bytes,
    )


def are_hashes(hashes: Sequence[bytes]) -> bool:
    """Return whether the number and sizes of these hashes are possible for the chunks of a file."""
    return len(hashes) <= MAX_CHUNKS and all(len(each) == 32 for each in hashes)


def description_to(description: Description) -> swarm_pb2.DescribeReply:
    manifests = [swarm_pb2.SignedManifest(body=body, organiser_key=key, signature=sign) for body, key, sign in description.manifests]
    access = access_to(description.access)
    return swarm_pb2.DescribeReply(manifests=manifests, software=description.software, clock_s=description.clock_s, access=access)


def description_from(reply: swarm_pb2.DescribeReply) -> Description:
    manifests = tuple((m.body, m.organiser_key, m.signature) for m in reply.manifests)
    return Description(manifests, reply.software, reply.clock_s, access_from(reply))


def access_to(raw: RawList | None) -> swarm_pb2.AccessList | None:
    return None if raw is None else swarm_pb2.AccessList(body=raw[0], signature=raw[1])


def access_from(message: swarm_pb2.GossipRequest | swarm_pb2.GossipReply | swarm_pb2.DescribeReply) -> RawList | None:
    return (message.access.body, message.access.signature) if message.HasField("access") else None


def bitmap_from(raw: bytes) -> int:
    if len(raw) > MAX_MICROBATCHES_PER_STEP // 8:
        raise BadMessageError("the ledger is longer than any step")
    return int.from_bytes(raw, "little")


def tallies_to(stages: Iterable[StageTally]) -> list[swarm_pb2.StageTally]:
    return [_copied(swarm_pb2.StageTally, s, _RANGE, tallies=[_copied(swarm_pb2.Tally, t, _COUNTS) for t in s.tallies]) for s in stages]


def tallies_from(messages: Iterable[swarm_pb2.StageTally]) -> tuple[StageTally, ...]:
    """Check the form of tallies. Whether they can be true is decided in policy/step/contributions.py."""
    stages = tuple(_copied(StageTally, m, _RANGE, tallies=tuple(_copied(Tally, t, _COUNTS) for t in m.tallies)) for m in messages)
    rows = [row for stage in stages for row in stage.tallies]
    if len(stages) > MAX_STAGES or len(rows) > MAX_TALLIES:
        raise BadMessageError(f"{len(rows)} tallies of {len(stages)} stages")
    if any(max(s.stage, s.first_step, s.last_step, s.steps) > MAX_COUNT for s in stages):
        raise BadMessageError("a step of a tally is out of range")
    if any(
        max(row.steps, row.microbatches, row.tokens) > MAX_COUNT or len(row.peer) > MAX_PEER_CHARS or not row.peer.isalnum() for row in rows
    ):
        raise BadMessageError("a tally is out of range")
    return stages


def _copied(kind: Callable[..., Copied], source: Any, names: Iterable[str], **others: Any) -> Copied:
    """A value of another kind whose fields of these names are the source's."""
    return kind(**{name: getattr(source, name) for name in names}, **others)
