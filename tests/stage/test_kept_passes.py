"""Which calls a peer keeps for audits where memory does not suffice for all: rule 20 (audit)."""

from __future__ import annotations

from collections import Counter

from peerd.link.links import Bytes
from peerd.policy.step.receipts import NOTHING, AnsweredPass, AskedPass, Receipt, SignedPass, ledger_name
from peerd.stage.witnessing import KeptPass, KeptPasses
from peerd.table.record import PeerId, RunId
from peerd.wire.messages import TensorBytes

RUN = RunId("a run")
LIAR, HONEST, OTHER, ME = map(PeerId, ("liar", "honest", "other", "me"))
LEDGER = ledger_name(1, 1)
PASS_BYTES = 100


def kept_pass(caller: PeerId, index: int, *, ledger: bytes = LEDGER, step: int = 0, inputs: bytes = b"") -> KeptPass:
    asked = AskedPass(1, step, index, caller, ME, inputs or b"%d" % index, b"labels")
    receipt = Receipt(asked, AnsweredPass(b"gradient", NOTHING, b"lineage", ledger), b"signed", b"signed, too")
    chunks: tuple[Bytes, ...] = (bytes(PASS_BYTES),)
    return KeptPass(SignedPass(receipt), TensorBytes("int32", (PASS_BYTES // 4,), chunks), TensorBytes("int32", (0,), ()), None)


def callers(kept: KeptPasses) -> Counter[PeerId]:
    return Counter(each.caller for each in kept._kept.values())


def fill(kept: KeptPasses, caller: PeerId, num: int, *, first: int = 0, ledger: bytes = LEDGER) -> None:
    for number in range(num):
        kept.put(RUN, kept_pass(caller, first + number, ledger=ledger, inputs=b"%d, another" % number))


def test_hole_76_a_caller_that_fills_the_memory_keeps_nothing_of_others_from_being_audited() -> None:
    kept = KeptPasses(12 * PASS_BYTES)
    fill(kept, LIAR, 100)
    fill(kept, HONEST, 4)
    assert callers(kept) == {LIAR: 8, HONEST: 4}
    fill(kept, OTHER, 12)
    assert callers(kept) == {LIAR: 4, HONEST: 4, OTHER: 4}
    fill(kept, LIAR, 100, first=100)
    assert callers(kept) == {LIAR: 4, HONEST: 4, OTHER: 4}
    assert kept.num_bytes == 12 * PASS_BYTES
    assert len(kept.asked_by(HONEST, 1, 0)) == 4


def test_hole_76_calls_that_were_added_to_no_ledger_push_none_out_that_was() -> None:
    """Anybody can make any number of them, through a peer that then makes as many calls of its own."""
    kept = KeptPasses(12 * PASS_BYTES)
    fill(kept, LIAR, 100, ledger=NOTHING)
    fill(kept, ME, 100, ledger=NOTHING)
    assert callers(kept) == {LIAR: 6, ME: 6}
    fill(kept, HONEST, 10)
    assert callers(kept)[HONEST] == 10
    fill(kept, LIAR, 100, first=100, ledger=NOTHING)
    fill(kept, ME, 100, first=100, ledger=NOTHING)
    assert callers(kept)[HONEST] == 10
    assert kept.num_kept == len(kept._kept) == 12
    assert len(kept.answered_by(ME, 1, 0)) == 10


def test_hole_76_of_calls_that_were_added_to_no_ledger_no_receipts_stay_once_their_tensors_are_gone() -> None:
    kept = KeptPasses(2 * PASS_BYTES)
    fill(kept, LIAR, 1000, ledger=NOTHING)
    assert sum(map(len, kept._receipts.values())) == 0
    assert len(kept._kept) == 2


def test_what_is_larger_than_all_of_the_memory_pushes_nothing_out() -> None:
    kept = KeptPasses(PASS_BYTES)
    fill(kept, HONEST, 1)
    large = kept_pass(LIAR, 1)
    chunks: tuple[Bytes, ...] = (bytes(2 * PASS_BYTES),)
    kept.put(RUN, KeptPass(large.signed, TensorBytes("int32", (PASS_BYTES // 2,), chunks), large.labels, None))
    assert callers(kept) == {HONEST: 1}
