"""What goes out comes in again as it was, and what breaks a rule of the wire is refused before anyone sees it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.manifest import MAX_BOUNDARY_BYTES, MAX_MICROBATCHES_PER_STEP
from peerd.errors import BadMessageError
from peerd.generated import averaging_pb2, stage_pb2, swarm_pb2
from peerd.policy.step.contributions import StageTally, Tally
from peerd.policy.swarm.spreading import TAG_BYTES
from peerd.table.forms import bitmap_to
from peerd.table.record import PeerId
from peerd.wire import convert
from peerd.wire.messages import Beat, Call, Frame, TensorBytes, Verified
from peerd.wire.rosters import proposal_from
from tests.wire.strategies import beats, bitmaps, calls, frames, tensors, verified

RUN = "f" * 32


@given(st.lists(st.binary(min_size=TAG_BYTES, max_size=TAG_BYTES), max_size=256))
def test_names_of_records_come_back_as_they_were(tags: list[bytes]) -> None:
    assert convert.tags_from(convert.tags_to(tags)) == frozenset(tags)


@given(calls(), st.lists(st.tuples(st.binary(max_size=8), st.binary(max_size=8)), max_size=3))
def test_a_call_comes_back_as_it_was(call: Call, records: list[tuple[bytes, bytes]]) -> None:
    sent = convert.call_to(call, RUN, records).SerializeToString()
    header = stage_pb2.CallHeader.FromString(sent)
    assert convert.call_from(header) == call
    assert convert.records_from(header.records) == tuple(records)
    assert header.run == RUN


@given(frames, verified, beats())
def test_chunks_and_words_of_a_round_come_back_as_they_were(frame: Frame, held: Verified, beat: Beat) -> None:
    header = averaging_pb2.ChunkHeader.FromString(convert.frame_to(frame).SerializeToString())
    assert convert.frame_from(header) == frame
    word = averaging_pb2.Verified.FromString(convert.verified_to(held, bytes(16)).SerializeToString())
    assert convert.verified_from(word) == held
    assert convert.id_from(word.average_id) == bytes(16)
    told = convert.beat_from(averaging_pb2.RoundBeat.FromString(convert.beat_to(beat).SerializeToString()))
    assert replace(told, still_s=beat.still_s) == beat
    assert told.still_s == pytest.approx(beat.still_s, abs=1e-3)


def test_words_of_a_round_that_are_too_long_are_refused() -> None:
    many = convert.MAX_ROSTER + 1
    for message in (
        averaging_pb2.RoundBeat(average_id=bytes(16), parts=many * [0]),
        averaging_pb2.RoundBeat(average_id=bytes(16), sums=many * [0]),
        averaging_pb2.RoundBeat(average_id=bytes(16), carrying=many * [averaging_pb2.Carrying()]),
        averaging_pb2.RoundBeat(average_id=bytes(15)),
    ):
        with pytest.raises(BadMessageError):
            convert.beat_from(message)
    with pytest.raises(BadMessageError):
        convert.verified_from(averaging_pb2.Verified(carried=many * [averaging_pb2.Carried()]))
    with pytest.raises(BadMessageError):
        convert.frame_from(averaging_pb2.ChunkHeader(signature=bytes(convert.MAX_SIGNATURE_BYTES + 1)))


@given(bitmaps)
def test_a_ledger_comes_back_as_it_was(bitmap: int) -> None:
    assert convert.bitmap_from(bitmap_to(bitmap)) == bitmap


@given(tensors())
def test_a_tensors_header_comes_back_as_it_was(tensor: TensorBytes) -> None:
    assert convert.tensor_from(convert.tensor_to(tensor)) == tensor


@given(st.binary(max_size=200))
def test_junk_is_a_bad_message_or_a_message_but_never_another_error(junk: bytes) -> None:
    for read in (
        lambda: convert.call_from(stage_pb2.CallHeader.FromString(junk)),
        lambda: proposal_from(averaging_pb2.Proposal.FromString(junk), list),
        lambda: convert.frame_from(averaging_pb2.ChunkHeader.FromString(junk)),
        lambda: convert.verified_from(averaging_pb2.Verified.FromString(junk)),
        lambda: convert.beat_from(averaging_pb2.RoundBeat.FromString(junk)),
    ):
        try:
            read()
        except DecodeError:  # gRPC decodes before us and refuses by itself
            assert junk
        except BadMessageError as error:
            assert len(error.message) < 200


@pytest.mark.parametrize(
    "header",
    [
        stage_pb2.TensorHeader(shape=[2], dtype="float16", num_bytes=4),
        stage_pb2.TensorHeader(shape=[2], dtype="", num_bytes=4),
        stage_pb2.TensorHeader(shape=[], dtype="float32", num_bytes=4),
        stage_pb2.TensorHeader(shape=[1] * 9, dtype="float32", num_bytes=4),
        stage_pb2.TensorHeader(shape=[2], dtype="float32", num_bytes=7),
        stage_pb2.TensorHeader(shape=[2], dtype="float32", num_bytes=0),
        stage_pb2.TensorHeader(shape=[2], dtype="float32", num_bytes=8, codec="int8"),
        stage_pb2.TensorHeader(shape=[2], dtype="float32", num_bytes=8, codec="zip"),
        stage_pb2.TensorHeader(shape=[2], dtype="int32", num_bytes=4, codec="bfloat16"),
        stage_pb2.TensorHeader(shape=[1 << 27], dtype="float32", num_bytes=6 << 15, codec="topk:0.000001"),
        stage_pb2.TensorHeader(shape=[2**63, 2**63], dtype="float32", num_bytes=0),
        stage_pb2.TensorHeader(shape=[MAX_BOUNDARY_BYTES], dtype="float32", num_bytes=4 * MAX_BOUNDARY_BYTES),
    ],
)
def test_a_tensor_that_its_bytes_cannot_make_is_refused(header: stage_pb2.TensorHeader) -> None:
    with pytest.raises(BadMessageError):
        convert.tensor_from(header)


@pytest.mark.parametrize(
    "changes",
    [
        {"call_id": b"short"},
        {"call_id": bytes(17)},
        {"microbatch": MAX_MICROBATCHES_PER_STEP},
        {"accumulate": range(convert.MAX_STAGES + 1)},
        {"path": [stage_pb2.Hop(stage=0, peer="a")] * (convert.MAX_STAGES + 1)},
    ],
)
def test_a_call_out_of_range_is_refused(changes: dict[str, object]) -> None:
    tensor = stage_pb2.TensorHeader(shape=[1], dtype="int32", num_bytes=4)
    known = {"call_id": bytes(16), "inputs": tensor, "labels": tensor}
    with pytest.raises(BadMessageError):
        convert.call_from(stage_pb2.CallHeader(**{**known, **changes}))  # type: ignore[arg-type]


def test_more_than_may_travel_at_once_is_refused() -> None:
    with pytest.raises(BadMessageError, match="65 records"):
        convert.records_from([swarm_pb2.SignedRecord()] * (convert.MAX_RECORDS + 1))
    with pytest.raises(BadMessageError, match="ledger"):
        convert.bitmap_from(bytes(MAX_MICROBATCHES_PER_STEP // 8 + 1))


def test_a_path_keeps_the_last_peer_of_a_stage() -> None:
    header = stage_pb2.CallHeader(call_id=bytes(16), path=[stage_pb2.Hop(stage=1, peer="a"), stage_pb2.Hop(stage=1, peer="b")])
    for tensor in (header.inputs, header.labels):
        tensor.CopyFrom(stage_pb2.TensorHeader(shape=[1], dtype="int32", num_bytes=4))
    assert convert.call_from(header).path == {1: PeerId("b")}


def tally_message(**changes: object) -> swarm_pb2.StageTally:
    fields: dict[str, object] = {"stage": 1, "first_step": 2, "last_step": 9, "steps": 5, "tallies": []}
    return swarm_pb2.StageTally(**{**fields, **changes})  # type: ignore[arg-type]


def test_tallies_come_back_as_they_were() -> None:
    tally = StageTally(stage=1, first_step=2, last_step=9, steps=5, tallies=(Tally(peer="abc", steps=3, microbatches=7, tokens=56),))
    assert convert.tallies_from(convert.tallies_to([tally])) == (tally,)


@pytest.mark.parametrize(
    "messages",
    [
        [tally_message(steps=1 << 63)],
        [tally_message(tallies=[swarm_pb2.Tally(peer="a" * 65)])],
        [tally_message(tallies=[swarm_pb2.Tally(peer="a/../b")])],
        [tally_message(tallies=[swarm_pb2.Tally(peer="")])],
        [tally_message(tallies=[swarm_pb2.Tally(peer="a", microbatches=1 << 63)])],
        [tally_message(tallies=[swarm_pb2.Tally(peer="a", tokens=1 << 63)])],
        [tally_message(tallies=[swarm_pb2.Tally(peer="a")] * 20_001)],
        [tally_message()] * 4097,
    ],
)
def test_tallies_out_of_range_are_refused(messages: list[swarm_pb2.StageTally]) -> None:
    with pytest.raises(BadMessageError):
        convert.tallies_from(messages)
