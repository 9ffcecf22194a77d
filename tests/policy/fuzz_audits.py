"""How accusations, words and items of audits are drawn, whatever peers say in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from peerd.policy.step.auditing import AuditWord, Item
from peerd.policy.step.claims import Claims
from peerd.policy.step.coins import Commitments
from peerd.policy.step.evidence import Evidence, SignedWord
from peerd.policy.step.parts import SentPart
from peerd.policy.step.proving import Proof
from peerd.policy.step.receipts import AnsweredPass, AskedPass, Receipt, SentOn, ShownTensors, SignedAsk, SignedPass
from peerd.policy.step.sketching import SketchTurns
from peerd.policy.step.tied import TiedSource, WantedSum
from peerd.policy.step.verdicts import Case, CaseVerdict, Ruling, Standing
from peerd.policy.step.withholding import Withholding
from peerd.table.record import AverageId, PeerId
from tests.policy.fuzz_records import World


def _source(world: World) -> TiedSource:
    return TiedSource(world.some_peer(), AverageId(world.raw(16)))


def _some_peers(world: World) -> list[PeerId]:
    return [world.some_peer() for _ in range(world.random.randrange(20))]


def _item(world: World) -> Item:
    index = world.random.choice((None, 0, world.count()))
    return Item(world.some_peer(), world.some_stage(), world.some_step(), index, world.raw(32))


def _word(world: World) -> AuditWord:
    told = (0.0, -1.0, 5e-324, 1e-4, 1.0, 1e300, math.inf, math.nan)
    return AuditWord(world.random.choice(told), world.random.choice(told))


def _case(world: World) -> Case:
    words = {world.some_peer(): _word(world) for _ in range(world.random.randrange(40))}
    return Case(_item(world), world.some_peer(), words, world.random.random() < 0.5)


def _hash(world: World) -> bytes:
    return world.random.choice((b"", world.raw(32)))


def _asked(world: World) -> AskedPass:
    sides = world.some_peer(), world.some_peer()
    return AskedPass(world.some_stage(), world.some_step(), world.count(), *sides, *(_hash(world) for _ in range(4)))


def _ask(world: World) -> SignedAsk:
    return SignedAsk(_asked(world), world.raw(64))


def _sent_on(world: World) -> SentOn:
    return SentOn(_ask(world), _receipt(world))


def _receipt(world: World) -> Receipt:
    answered = AnsweredPass(_hash(world), _hash(world), _hash(world), world.random.choice((b"", world.raw(8))))
    return Receipt(_asked(world), answered, world.raw(64), world.raw(64))


def _signed(world: World) -> SignedPass:
    return SignedPass(_receipt(world), world.maybe(lambda: _receipt(world)))


def _sent(world: World) -> SentPart:
    place = world.count(1 << 31), world.count(1 << 31), world.count(1 << 31)
    average_id = AverageId(world.raw(16))
    return SentPart(world.some_peer(), world.some_stage(), world.some_step(), average_id, place, world.raw(32), world.raw(64), _hash(world))


def _words(world: World) -> tuple[SignedWord, ...]:
    return tuple(SignedWord(world.some_peer(), _word(world), world.raw(64)) for _ in range(world.random.randrange(40)))


def _evidence(world: World) -> Evidence:
    insists, signed = world.random.choice((b"", world.raw(64))), world.random.choice((_signed, _sent_on, _sent))(world)
    return Evidence(signed, world.some_peer(), world.raw(64), insists=insists).with_words(_words(world))


def _commitments(world: World) -> Commitments:
    found = Commitments()
    for record in world.records[:64]:
        found.note(record, world.some_step())
    return found


MAKERS: Mapping[type, Callable[[World], Any]] = {
    Item: _item,
    AuditWord: _word,
    Case: _case,
    Standing: lambda _w: Standing(),
    Receipt: _receipt,
    SignedPass: _signed,
    SignedAsk: _ask,
    SentOn: _sent_on,
    SignedWord: lambda w: SignedWord(w.some_peer(), _word(w), w.raw(64)),
    Evidence: _evidence,
    Commitments: _commitments,
    Withholding: lambda _w: Withholding(),
    SentPart: _sent,
    Claims: lambda _w: Claims(),
    SketchTurns: lambda _w: SketchTurns(),
    Proof: lambda w: Proof([w.some_peer() for _ in range(w.random.randrange(9))], w.raw(32), w.random.choice((0.0, w.now_s)), 5.0),
}

ARGUMENTS: Mapping[str | tuple[str, str], Callable[[World], Any]] = {
    **dict.fromkeys((("known", "Sequence[PeerId]"), ("known", "Collection[PeerId]"), "behind", "busy"), _some_peers),
    ("took_s", "float"): lambda w: w.random.choice((0.0, 1e-3, 5.0, 1e6)),
    "asker": World.some_peer,
    "wanted": lambda w: WantedSum(AverageId(w.raw(16)), tuple(w.many(lambda: _source(w)))),
    "source": _source,
    "num_asked": lambda w: w.random.randrange(17),
    "distance": lambda w: lambda _one, _other: w.random.choice((0.0, 1e-7, 1.0, math.inf, math.nan)),
    "item": _item,
    "items": lambda w: [(_item(w), w.random.choice((0.0, 5e-324, 0.01, 1.0))) for _ in range(w.random.choice((0, 1, 300)))],
    "word": _word,
    ("other", "AuditWord"): _word,
    ("other", "Case"): _case,
    "case": _case,
    ("other", "Evidence"): _evidence,
    ("words", "Iterable[SignedWord]"): _words,
    ("own", "Receipt"): _receipt,
    **dict.fromkeys((("asked", "AskedPass"), ("below", "AskedPass")), lambda w: _receipt(w).asked),
    "below": lambda w: w.maybe(lambda: _receipt(w)),
    ("passes", "Iterable[SignedPass] | None"): lambda w: w.maybe(lambda: [_signed(w) for _ in range(w.random.choice((0, 1, 300)))]),
    ("signed", "Iterable[SignedPass]"): lambda w: [_signed(w) for _ in range(w.random.choice((0, 1, 300)))],
    "author": World.some_peer,
    "got": lambda w: w.maybe(lambda: _ask(w)),
    ("inputs", "bytes"): _hash,
    ("pairs", "Iterable[SignedPass]"): lambda w: [_signed(w) for _ in range(w.random.choice((0, 1, 300)))],
    "room": lambda w: w.random.randrange(9),
    "_run": lambda _w: "run",
    "shown": lambda w: ShownTensors(*(_hash(w) for _ in range(3))),
    ("lineage", "bytes"): _hash,
    "is_of": lambda w: lambda _peer, _text, _signature: w.random.random() < 0.5,
    "words": lambda w: _case(w).words,
    "counted": lambda w: _case(w).words,
    **dict.fromkeys(("standing", "voters"), lambda w: w.names[:64]),
    "open_cases": lambda w: [_case(w) for _ in range(w.random.randrange(4))],
    "verdict": lambda w: CaseVerdict(w.random.choice(list(Ruling)), frozenset({w.peer()})),
    "num_voters": lambda w: w.random.randrange(64),
    "num_silent": lambda w: w.random.randrange(9),
    **dict.fromkeys(("secret", "seed"), lambda w: w.raw(32)),
    "its_chance": lambda w: w.random.choice((0.0, 0.01, 1.0)),
    **dict.fromkeys((("mates", "Iterable[PeerRecord]"), ("others", "Iterable[PeerRecord]")), lambda w: w.records[:64]),
    "notes": lambda w: [(w.some_peer(), w.count(), True, w.count(), w.count(), w.count())],
    "accuser": World.some_peer,
    "peers": lambda w: w.names[:64],
    **dict.fromkeys(("is_due", "is_paused", "is_odd"), lambda w: w.random.random() < 0.5),
}
