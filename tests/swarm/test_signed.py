"""Records and manifests as signed bytes: they come back as they were, and nothing else is believed or breaks anything."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, get_type_hints

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from peerd.config.manifest import Manifest
from peerd.errors import BadMessageError, ManifestError, SignatureError
from peerd.link.peer_keys import peer_id_of
from peerd.swarm.identity import Identity
from peerd.swarm.signed import (
    MAX_RECORD_BYTES,
    NUM_FIELDS,
    pack,
    peek_record,
    read_manifest,
    read_record,
    sign_manifest,
    sign_record,
    unpack_manifest,
    unpack_record,
)
from peerd.table.record import (
    MAX_OFFSET,
    MAX_RATE,
    MAX_STAGES,
    MAX_STEP,
    Aside,
    AverageId,
    Coordinate,
    Evaluation,
    Lineage,
    PeerId,
    PeerRecord,
    Phase,
    Reach,
    RunId,
    StageSummary,
    StepNorm,
    Suspicion,
    TiedSum,
    Void,
)

RUN, OTHER_RUN = RunId("a" * 32), RunId("b" * 32)
ME = Identity(Ed25519PrivateKey.from_private_bytes(bytes(32)))
SOMEBODY = Identity(Ed25519PrivateKey.from_private_bytes(b"\1" * 32))

counts = st.integers(0, (1 << 62) - 1)
steps = st.integers(0, MAX_STEP)
texts = st.text(st.characters(categories=["L", "N", "P"]), max_size=64)
reals = st.floats(0, 1e12, allow_nan=False)
peers = st.sampled_from([ME.peer, SOMEBODY.peer])
PLAUSIBLE: dict[str, st.SearchStrategy[Any]] = {
    "peer": st.just(ME.peer),
    "incarnation": counts,
    "version": counts,
    "addresses": st.lists(texts, max_size=8).map(tuple),
    "stage": st.integers(0, MAX_STAGES - 1),
    "step": steps,
    "phase": st.sampled_from(Phase),
    "done": st.integers(0, (1 << 8192) - 1) | st.integers(0, 255),
    "ledger_no": counts,
    "next_done": st.integers(0, (1 << 8192) - 1) | st.integers(0, 255),
    "next_ledger_no": counts,
    "asides": st.lists(st.builds(Aside, peers | st.just(PeerId("")), st.integers(0, 255)), max_size=3).map(tuple),
    "next_asides": st.lists(st.builds(Aside, peers, st.integers(0, 255)), max_size=3).map(tuple),
    "average_id": st.binary(max_size=16).map(AverageId),
    "lineage": st.builds(Lineage, counts, st.binary(max_size=32)),
    "gradient_norm": st.none() | reals | st.just(math.inf),
    "norms": st.lists(st.builds(StepNorm, steps, reals | st.just(math.inf)), max_size=8).map(tuple),
    "tied_sum": st.binary(max_size=16).map(AverageId),
    "tied_sums": st.lists(st.builds(TiedSum, steps, st.binary(max_size=16).map(AverageId)), max_size=8).map(tuple),
    "tied": st.builds(Lineage, counts, st.binary(max_size=32)),
    "reach": st.sampled_from(Reach),
    **dict.fromkeys(("relays", "leaving", "paused", "trains", "unlisted"), st.booleans()),
    "suspects": st.lists(st.builds(Suspicion, peers, counts, counts), max_size=8).map(tuple),
    "voids": st.lists(st.builds(Void, peers, counts, steps), max_size=8).map(tuple),
    "throughput": reals.filter(lambda rate: rate <= 1e9),
    "stays_hours": st.integers(0, 99),
    "coins": st.binary(max_size=64),
    "computes": reals.filter(lambda rate: rate <= 1e9),
    **dict.fromkeys(("backlog", "drift"), reals.filter(lambda value: value <= 1e3)),
    "tokens": counts,
    "last_loss": st.none() | reals,
    **dict.fromkeys(("nickname", "team"), st.sampled_from(["", "anna", "Jos\u00e9 2", "x" * 24])),
    **dict.fromkeys(("software", "device"), texts),
    "memory_bytes": counts,
    "unaveraged": steps,
    **dict.fromkeys(("up", "down"), st.integers(0, MAX_RATE)),
    "coordinate": st.none() | st.builds(Coordinate, *[st.integers(-MAX_OFFSET, MAX_OFFSET)] * 2, *[st.integers(0, 2000)] * 2),
    "gives_start": st.booleans(),
    "periods": st.integers(1, 256),
    "summary": st.none()
    | st.builds(
        StageSummary,
        peers=st.integers(0, 1 << 20),
        trainers=st.integers(0, 1 << 20),
        queue=st.integers(0, 1 << 40),
        throughput=reals,
        held=st.integers(0, (1 << 8192) - 1) | st.integers(0, 255),
        next_held=st.integers(0, (1 << 8192) - 1) | st.integers(0, 255),
    ),
}


PLACES = {name: hint.__metadata__[0] for name, hint in get_type_hints(PeerRecord, include_extras=True).items()}
SOME_RUNS = [[name for name, its_place in PLACES.items() if its_place == place] for place in range(NUM_FIELDS, max(PLACES.values()) + 1)]
"""The fields of each part: what only some records say."""


def records() -> st.SearchStrategy[PeerRecord]:
    return st.fixed_dictionaries(PLAUSIBLE).map(lambda values: PeerRecord(**values))


def records_of_runs() -> st.SearchStrategy[tuple[PeerRecord, int]]:
    """With any of what only some runs have, and the last of it: 0 for none."""

    def without_others(record: PeerRecord, had: list[bool]) -> tuple[PeerRecord, int]:
        plain = PeerRecord(peer=ME.peer)
        absent = {name: getattr(plain, name) for names, has in zip(SOME_RUNS, had, strict=True) for name in names if not has}
        found = replace(record, **absent)
        unlike = [any(getattr(found, name) != getattr(plain, name) for name in names) for names in SOME_RUNS]
        return found, max((place for place, is_there in enumerate(unlike, 1) if is_there), default=0)

    return st.builds(without_others, records(), st.lists(st.booleans(), min_size=len(SOME_RUNS), max_size=len(SOME_RUNS)))


# Records


def test_every_place_is_taken_and_the_first_ones_by_one_field_each() -> None:
    assert sorted(place for place in PLACES.values() if place < NUM_FIELDS) == list(range(NUM_FIELDS))
    assert all(SOME_RUNS)


FULL = PeerRecord(
    peer=ME.peer,
    incarnation=2,
    version=300,
    addresses=("/ip4/10.0.0.1/tcp/31337", "/ip4/127.0.0.1/tcp/31337"),
    reach=Reach.RELAYED,
    relays=True,
    stage=3,
    step=70_000,
    phase=Phase.AVERAGED,
    done=0b1011,
    ledger_no=5,
    next_done=1 << 9,
    next_ledger_no=6,
    average_id=AverageId(b"average"),
    lineage=Lineage(1, b"chain"),
    gradient_norm=0.5,
    norms=(StepNorm(69_998, 2.0), StepNorm(69_999, math.inf)),
    tied_sum=AverageId(b"sum"),
    tied_sums=(TiedSum(69_999, AverageId(b"last")),),
    tied=Lineage(0, b"tied"),
    leaving=True,
    trains=True,
    trains_from=4,
    suspects=(Suspicion(ME.peer, 1, 9),),
    voids=(Void(ME.peer, 1, 70_000),),
    checkpoints=(10, 20),
    gives_start=True,
    queue=7,
    in_flight=8,
    throughput=12.25,
    tokens=1 << 40,
    last_loss=3.5,
    evaluation=Evaluation(69_000, 3.25),
    software="0.9",
    device="cpu",
    memory_bytes=8 << 30,
    periods=6,
    summary=StageSummary(peers=4, trainers=3, queue=2, throughput=1.5, held=255, next_held=256),
)
FULL_BYTES = """
dc0020d934313244334b6f6f5744704a3741733742574177524d6675315655325743714e6a76713338374a45594b44426a346b78366e58544e02cd012c92b72f
6970342f31302e302e302e312f7463702f3331333337b82f6970342f3132372e302e302e312f7463702f333133333703ce0001117003c4010b05c40761766572
6167659201c405636861696ec3c3049193d934313244334b6f6f5744704a3741733742574177524d6675315655325743714e6a76713338374a45594b44426a34
6b78366e58544e01099193d934313244334b6f6f5744704a3741733742574177524d6675315655325743714e6a76713338374a45594b44426a346b78366e5854
4e01ce00011170920a14c30708cb4028800000000000cf0000010000000000cb400c00000000000092ce00010d88cb400a000000000000a3302e39a3637075cf
000000020000000092cb3fe00000000000009292ce0001116ecb400000000000000092ce0001116fcb7ff000000000000092c40200020693c40373756d9192ce
0001116fc4046c6173749200c404746965649202c3920696040302cb3ff8000000000000c401ffc4020001
"""
PLAIN_BYTES = """
dc001bd934313244334b6f6f5744704a3741733742574177524d6675315655325743714e6a76713338374a45594b44426a346b78366e58544e000090000000c4
0000c4009200c400c2c200909090c20000cb000000000000000000c0c0a0a000
"""
REACHED_BYTES = """
dc001fd934313244334b6f6f5744704a3741733742574177524d6675315655325743714e6a76713338374a45594b44426a346b78366e58544e000090000000c4
0000c4009200c400c2c200909090c20000cb000000000000000000c0c0a0a000c0c0c09203c2
"""


@pytest.mark.parametrize(
    ("record", "written"),
    [
        (FULL, FULL_BYTES),
        (PeerRecord(peer=ME.peer), PLAIN_BYTES),
        (PeerRecord(peer=ME.peer, reach=Reach.CLIENT), REACHED_BYTES),
    ],
)
def test_a_record_keeps_its_bytes(record: PeerRecord, written: str) -> None:
    """Peers of other versions have to read them. A new field adds a place and leaves these bytes as they are."""
    signed = sign_record(record, ME, RUN)
    assert signed.body == bytes.fromhex(written)
    assert read_record(signed.body, signed.signature, RUN).record == record


@given(records())
def test_a_record_comes_back_as_it_was(record: PeerRecord) -> None:
    signed = sign_record(record, ME, RUN)
    if len(signed.body) > MAX_RECORD_BYTES:
        with pytest.raises(BadMessageError, match="bytes"):
            read_record(signed.body, signed.signature, RUN)
        return
    assert read_record(signed.body, signed.signature, RUN) == signed
    assert peek_record(signed.body) == (record.peer, record.pair)
    assert unpack_record(pack(signed), RUN) == signed


@given(records_of_runs())
def test_what_only_some_runs_have_is_told_apart_and_costs_the_others_nothing(made: tuple[PeerRecord, int]) -> None:
    record, last = made
    signed = sign_record(record, ME, RUN)
    assert len(msgpack.unpackb(signed.body)) == NUM_FIELDS + last
    if len(signed.body) <= MAX_RECORD_BYTES:
        assert read_record(signed.body, signed.signature, RUN).record == record


def test_a_record_that_says_all_there_is_to_say_has_room() -> None:
    whole, average, history = (1 << 8192) - 1, AverageId(b"a" * 16), Lineage(1 << 40, b"c" * 32)
    told = StageSummary(peers=1 << 20, trainers=9, queue=1 << 30, throughput=1.5, held=whole, next_held=whole)
    ledgers = {"done": whole, "ledger_no": 8, "next_done": whole, "next_ledger_no": 9, "average_id": average, "lineage": history}
    tied = {"tied_sum": average, "tied_sums": (TiedSum(9, average),) * 4, "tied": history, "norms": (StepNorm(9, 0.5),) * 8}
    found = {"addresses": ("/ip4/203.0.113.200/tcp/31337/p2p/" + "x" * 140,) * 8, "suspects": (Suspicion(ME.peer, 9, 9),) * 8}
    mates = {"unreached": (ME.peer,) * 16, "sidelined": (ME.peer,) * 8}
    record = PeerRecord(peer=ME.peer, summary=told, periods=9, **mates, **ledgers, **tied, **found)  # type: ignore[arg-type]
    signed = sign_record(record, ME, RUN)
    assert read_record(signed.body, signed.signature, RUN) == signed


def test_a_record_with_more_fields_than_there_are_is_refused() -> None:
    fields_of = msgpack.unpackb(sign_record(PeerRecord(peer=ME.peer), ME, RUN).body)
    assert len(fields_of) == NUM_FIELDS
    for odd in (fields_of[:-1], [*fields_of, *[None] * (1 + len(SOME_RUNS))], [*fields_of, [1]], [*fields_of, 7]):
        body = msgpack.packb(odd)
        with pytest.raises(BadMessageError, match="bad record"):
            read_record(body, bytes(64), RUN)


def test_every_field_of_a_record_travels() -> None:
    """A new field that is forgotten in the encoding would silently come back as its default."""
    odd: dict[str, Any] = {entry.name: _unlike_default(entry.default) for entry in fields(PeerRecord)}
    odd |= {"peer": ME.peer, "lineage": Lineage(3, b"c"), "suspects": (Suspicion(ME.peer, 1, 2),), "voids": (Void(ME.peer, 1, 2),)}
    odd |= {"unreached": (ME.peer,), "sidelined": (ME.peer,), "asides": (Aside(PeerId(""), 5),), "next_asides": (Aside(ME.peer, 6),)}
    odd |= {"tied": Lineage(2, b"t"), "tied_sums": (TiedSum(4, AverageId(b"s")),)}
    odd |= {"gradient_norm": 2.5, "norms": (StepNorm(4, 0.5), StepNorm(5, math.inf))}
    odd |= {"phase": Phase.AVERAGED, "reach": Reach.RELAYED, "last_loss": 1.5, "addresses": ("a",)}
    signed = sign_record(PeerRecord(**odd), ME, RUN)
    assert read_record(signed.body, signed.signature, RUN).record == PeerRecord(**odd)


def _unlike_default(default: Any) -> Any:
    unlike: dict[type, Any] = {bool: True, int: 7, float: 2.5, str: "x", bytes: b"x", tuple: (5,)}
    return unlike.get(type(default))


@given(records(), st.integers(0, 10_000), st.integers(1, 255))
def test_no_byte_of_a_record_may_be_changed(record: PeerRecord, place: int, change: int) -> None:
    signed = sign_record(record, ME, RUN)
    body = bytearray(signed.body)
    body[place % len(body)] ^= change
    with pytest.raises(BadMessageError):
        read_record(bytes(body), signed.signature, RUN)


def test_a_record_is_signed_by_whom_it_is_about_and_for_one_run() -> None:
    record = PeerRecord(peer=ME.peer)
    forged, mine = sign_record(record, SOMEBODY, RUN), sign_record(record, ME, RUN)
    with pytest.raises(BadMessageError, match="not signed by it"):
        read_record(forged.body, forged.signature, RUN)
    with pytest.raises(BadMessageError, match="not signed by it"):
        read_record(mine.body, mine.signature, OTHER_RUN)


@given(st.binary(max_size=300))
def test_junk_is_refused_as_a_bad_message(junk: bytes) -> None:
    for read in READERS:
        with pytest.raises(BadMessageError):
            read(junk)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=26) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


@given(JUNK)
def test_well_formed_junk_is_refused_too(junk: Any) -> None:
    for read in READERS:
        with pytest.raises((BadMessageError, SignatureError)):  # the latter for three byte strings, which is a manifest's form
            read(msgpack.packb(junk))


READERS: tuple[Callable[[bytes], object], ...] = (
    lambda raw: read_record(raw, bytes(64), RUN),
    lambda raw: unpack_record(raw, RUN),
    unpack_manifest,
)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": 1 << 63},
        {"stage": 5000},
        {"throughput": float("nan")},
        {"throughput": 1e308},
        {"throughput": -1.0},
        {"up": MAX_RATE + 1},
        {"down": 2.5},
        {"coordinate": Coordinate(MAX_OFFSET + 1, 0, 0, 0)},
        {"last_loss": float("inf")},
        {"last_loss": -1.0},
        {"evaluation": Evaluation(1, -1000.0)},
        {"summary": StageSummary(peers=1, trainers=1, queue=1, throughput=1e308, held=0)},
        {"software": "line\nbreak"},
        {"device": "x" * 65},
        *({name: odd} for name in ("nickname", "team") for odd in ("x" * 25, "\x1b[2J", "a\u202eb", "..abcdef")),
        {"average_id": bytes(17)},
        {"lineage": Lineage(0, bytes(33))},
        {"done": 1 << 8192},
        {"next_done": 1 << 8192, "next_ledger_no": 1},
        {"leaving": 1},
        {"incarnation": True},
        {"incarnation": -1},
        {"gradient_norm": float("nan")},
        {"gradient_norm": -1.0},
        {"norms": (StepNorm(-1, 1.0),)},
        {"norms": (StepNorm(1, float("nan")),)},
        {"suspects": (Suspicion(ME.peer, 1, -1),)},
    ],
)
def test_a_field_out_of_range_is_refused_though_it_is_signed(changes: dict[str, Any]) -> None:
    signed = sign_record(replace(PeerRecord(peer=ME.peer), **changes), ME, RUN)
    with pytest.raises(BadMessageError):
        read_record(signed.body, signed.signature, RUN)


def test_a_record_of_no_peer_is_refused() -> None:
    signed = sign_record(PeerRecord(peer=peer_id_of(bytes(31) + b"x")), ME, RUN)
    for peer in ("", "x", "12D3KooW"):
        fields_of = msgpack.unpackb(signed.body)
        fields_of[0] = peer
        with pytest.raises(BadMessageError):
            read_record(msgpack.packb(fields_of), signed.signature, RUN)


# Manifests


def test_a_manifest_comes_back_as_it_was_and_names_its_run() -> None:
    key = Ed25519PrivateKey.generate()
    signed = sign_manifest(Manifest(name="mine"), key)
    assert unpack_manifest(pack(signed)) == signed
    assert signed.run != sign_manifest(Manifest(name="other"), key).run
    assert signed.run != sign_manifest(Manifest(name="mine"), Ed25519PrivateKey.generate()).run


def test_a_manifest_signed_by_another_key_or_changed_is_refused() -> None:
    signed = sign_manifest(Manifest(), Ed25519PrivateKey.generate())
    other = sign_manifest(Manifest(), Ed25519PrivateKey.generate())
    for body, key, signature in (
        (signed.body, other.organiser_key, signed.signature),
        (signed.body.replace(b'"seed":0', b'"seed":1'), signed.organiser_key, signed.signature),
        (signed.body, signed.organiser_key[:-1], signed.signature),
        (signed.body, signed.organiser_key, b""),
    ):
        with pytest.raises(SignatureError, match="not signed by its organiser"):
            read_manifest(body, key, signature)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"[" * 60_000, b'{"name": "a b"}', b'{"odd": 1}', b"\xff", b'{"seed": 1e999}'])
def test_a_manifest_that_breaks_a_rule_is_refused_though_it_is_signed(body: bytes) -> None:
    key = Ed25519PrivateKey.generate()
    signature = key.sign(b"peerd manifest\0" + body)
    with pytest.raises(ManifestError):
        read_manifest(body, key.public_key().public_bytes_raw(), signature)
