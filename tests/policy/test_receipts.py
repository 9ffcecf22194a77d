"""The receipts of rule 20 (audit): a peer is bound to what it got and gave, and to nothing that others make up."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from peerd.policy.step.receipts import NOTHING, AnsweredPass, AskedPass, Receipt, ShownTensors, SignedPass, why_not_judged
from peerd.table.record import PeerId, RunId

RUN, LINEAGE = RunId("run"), b"lineage"
FIELDS = ("inputs", "labels", "output_gradient")


def hash_of(what: str) -> bytes:
    return hashlib.sha256(what.encode()).digest()


def sign(peer: PeerId, text: bytes) -> bytes:
    return hashlib.sha256(peer.encode() + text).digest()


def is_of(peer: PeerId, text: bytes, signature: bytes) -> bool:
    return signature == sign(peer, text)


def receipt(stage: int, below: Receipt | None, run: RunId = RUN, index: int = 5) -> Receipt:
    """The call of peer p{stage - 1} to p{stage}. At the first stage the caller is a trainer."""
    caller, callee = (PeerId("trainer") if stage == 0 else PeerId(f"p{stage - 1}")), PeerId(f"p{stage}")
    asked = AskedPass(stage, 3, index, caller, callee, hash_of(f"activations of {stage - 1}"), hash_of("labels"))
    gradient = hash_of(f"gradient of {stage}") if stage else b""
    answered = AnsweredPass(gradient, below.signed(run) if below is not None else b"", LINEAGE)
    return Receipt(asked, answered, sign(caller, asked.text(run)), sign(callee, answered.text(asked, run)))


LAST = receipt(2, None)
MIDDLE = receipt(1, LAST)
FIRST = receipt(0, MIDDLE)
PATH = {0: (FIRST, MIDDLE), 1: (MIDDLE, LAST), 2: (LAST, None)}


def shown(stage: int) -> ShownTensors:
    """What was really sent."""
    return ShownTensors(
        inputs=hash_of(f"activations of {stage - 1}"),
        labels=hash_of("labels") if stage == 2 else b"",
        output_gradient=hash_of(f"gradient of {stage + 1}") if stage < 2 else b"",
    )


@pytest.mark.parametrize("stage", PATH)
def test_a_peer_is_bound_to_all_that_it_got_and_gave(stage: int) -> None:
    own, below = PATH[stage]
    assert own.why_unsigned(RUN, is_of) == ""
    assert why_not_judged(own, below, shown(stage), LINEAGE, RUN) == ""
    gave = (hash_of(f"activations of {stage}") if stage < 2 else NOTHING, hash_of(f"gradient of {stage}") if stage else NOTHING)
    assert SignedPass(own, below).gave == gave


def test_what_a_replay_does_not_need_need_not_be_shown() -> None:
    own, below = PATH[0]
    assert why_not_judged(own, below, ShownTensors(hash_of("activations of -1")), LINEAGE, RUN) == ""


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("stage", PATH)
def test_nobody_is_judged_by_tensors_that_it_has_not_signed(stage: int, field: str) -> None:
    own, below = PATH[stage]
    assert why_not_judged(own, below, replace(shown(stage), **{field: hash_of("made up")}), LINEAGE, RUN)


def test_nobody_is_judged_with_other_parameters_or_by_another_call() -> None:
    assert "other parameters" in why_not_judged(MIDDLE, LAST, shown(1), b"another", RUN)
    other = receipt(2, None, index=6)
    assert "another one" in why_not_judged(MIDDLE, other, shown(1), LINEAGE, RUN)
    assert "of another call" in why_not_judged(receipt(1, other), other, shown(1), LINEAGE, RUN)
    assert "another one" in why_not_judged(MIDDLE, None, shown(1), LINEAGE, RUN)
    assert "another one" in why_not_judged(LAST, LAST, shown(2), LINEAGE, RUN)


@pytest.mark.parametrize("stage", PATH)
def test_receipts_name_all_that_it_takes_to_compute_the_work_again(stage: int) -> None:
    own, below = PATH[stage]
    other = receipt(2, None, index=6)
    assert SignedPass(own, below).why_incomplete(3) == ""
    assert "another call" in SignedPass(own, other).why_incomplete(3)
    if below is None:
        assert "what the next stage got" in SignedPass(own).why_incomplete(4)
        return
    assert "what the next stage got" in SignedPass(own).why_incomplete(3)
    assert "another call" in SignedPass(own, below).why_incomplete(stage + 1)
    silent = replace(below, answered=replace(below.answered, gradient=NOTHING))
    for gradient, ledger, is_complete in ((NOTHING, NOTHING, True), (b"g", NOTHING, False), (NOTHING, b"l", False)):
        answered = replace(own.answered, gradient=gradient, ledger=ledger)
        assert (SignedPass(replace(own, answered=answered), silent).why_incomplete(3) == "") is is_complete


@pytest.mark.parametrize("name", ["stage", "step", "index", "caller", "callee", "inputs", "labels"])
def test_what_the_caller_asked_cannot_be_changed(name: str) -> None:
    old = getattr(MIDDLE.asked, name)
    changed = replace(MIDDLE.asked, **{name: old + 1 if isinstance(old, int) else old + old})  # type: ignore[arg-type]
    assert "has not signed" in replace(MIDDLE, asked=changed).why_unsigned(RUN, is_of)


@pytest.mark.parametrize("name", ["gradient", "below", "lineage"])
def test_what_the_callee_answered_cannot_be_changed(name: str) -> None:
    changed = replace(MIDDLE.answered, **{name: b"other"})
    assert "p1 has not signed" in replace(MIDDLE, answered=changed).why_unsigned(RUN, is_of)
    assert replace(MIDDLE, answered=changed).item(RUN) != MIDDLE.item(RUN)


def test_a_receipt_of_another_run_is_none() -> None:
    assert MIDDLE.why_unsigned(RunId("another"), is_of)


def test_the_item_is_the_callees_work() -> None:
    item = MIDDLE.item(RUN)
    assert (item.audited, item.stage, item.step, item.index) == ("p1", 1, 3, 5)
    assert item.signed == FIRST.answered.below
