"""Rule 20 (audit): what a peer signs of its part of an average binds it, and says of which microbatches the part is the sum."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from peerd.policy.step.parts import SentPart, basis_of, chunk_text, even_cuts, kept_chunk, passes_of_part, slice_bounds
from peerd.policy.step.receipts import NOTHING, AnsweredPass, AskedPass, Receipt, SignedPass, ledger_name
from peerd.policy.step.roster import Roster, RosterEntry
from peerd.table.record import PeerId, RunId
from tests.policy.test_receipts import is_of, sign

RUN = RunId("run")
A, B, C = (PeerId(name) for name in "abc")
ROSTER = Roster(1, 3, 0, A, (RosterEntry(A, 7, 2, 0b0011), RosterEntry(B, 8, 1, 0b1100), RosterEntry(C, 9, 5, 0)), num_chunks=4)
CONTENT = hashlib.sha256(b"a chunk").digest()


def sent(**changes: object) -> SentPart:
    place = (2, 1, 3)
    text = chunk_text(ROSTER.average_id, place, CONTENT)
    return replace(SentPart(B, 1, 3, ROSTER.average_id, place, CONTENT, sign(B, text)), **changes)  # type: ignore[arg-type]


def signed(index: int, callee: PeerId = B, ledger: bytes | None = None, inputs: bytes = b"i", step: int = 3) -> SignedPass:
    added = ledger_name(8, 1) if ledger is None else ledger
    return SignedPass(Receipt(AskedPass(1, step, index, A, callee, inputs, b"l"), AnsweredPass(b"g", NOTHING, b"p", added), b"", b""))


def test_a_chunk_is_its_authors_in_this_very_place_of_this_round() -> None:
    part = sent()
    assert part.why_unsigned(RUN, is_of) == ""
    assert part.why_not_judged(ROSTER) == ""
    assert part.item(RUN) == part.item(RUN)
    assert (part.item(RUN).audited, part.item(RUN).index) == (B, None)
    for changed in ({"author": A}, {"average_id": b"o" * 16}, {"place": (2, 1, 2)}, {"content": b"o" * 32}, {"signature": b""}):
        assert sent(**changed).why_unsigned(RUN, is_of) == f"{changed.get('author', B)} has not signed this chunk"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"average_id": b"o" * 16}, "another average"),
        ({"step": 4}, "another average"),
        ({"stage": 0}, "another average"),
        ({"author": A}, "no such part"),
        ({"place": (3, 1, 0)}, "no such part"),
        ({"place": (2, 3, 0)}, "no such part"),
        ({"place": (2, 1, 4)}, "no such chunk"),
    ],
)
def test_what_is_no_part_of_the_average_that_a_judge_holds_is_not_judged(changes: dict[str, object], reason: str) -> None:
    assert reason in sent(**changes).why_not_judged(ROSTER)


def test_a_part_is_the_sum_of_the_microbatches_that_are_signed_as_added_to_its_ledger() -> None:
    whole = [signed(3), signed(2)]
    assert passes_of_part(ROSTER, B, whole, b"p") == [signed(2), signed(3)]
    others = [signed(2, callee=A), signed(2, ledger=NOTHING, inputs=b"junk"), signed(3, ledger=ledger_name(8, 0)), signed(2, step=2)]
    assert passes_of_part(ROSTER, B, [*others, *whole, signed(5), whole[0]], b"p") == [signed(2), signed(3)]
    assert passes_of_part(ROSTER, C, whole, b"p") == []
    assert passes_of_part(ROSTER, B, whole, b"o") is None  # hole 84
    assert passes_of_part(ROSTER, PeerId("x"), whole, b"p") is None


def test_a_part_is_another_item_where_other_receipts_are_shown_of_it() -> None:
    whole, other = [signed(2), signed(3)], [signed(2, inputs=b"other"), signed(3)]
    assert basis_of(None, RUN) == b""
    bases = [basis_of(passes, RUN) for passes in (whole, other, whole[:1])]
    assert len({len(each) for each in bases}) == 1
    assert len({sent(basis=each).item(RUN).id for each in bases}) == 3
    assert {sent(basis=each).signed(RUN) for each in bases} == {sent().signed(RUN)}


def test_nobody_says_what_a_part_must_be_if_a_microbatch_is_missing_or_signed_twice() -> None:
    assert passes_of_part(ROSTER, B, [signed(3)], b"p") is None
    assert passes_of_part(ROSTER, B, [signed(3), signed(2), signed(2, inputs=b"other")], b"p") is None


def test_the_chunk_that_is_kept_is_another_one_for_each_secret_author_and_round() -> None:
    for drawn in (
        {kept_chunk(b"%d" % number, ROSTER.average_id, B, 4) for number in range(50)},
        {kept_chunk(b"s", ROSTER.average_id, PeerId(f"p{number}"), 4) for number in range(50)},
    ):
        assert drawn == set(range(4))
    assert kept_chunk(b"s", ROSTER.average_id, B, 0) == 0


def test_the_chunks_of_all_slices_are_the_whole_part() -> None:
    cuts = [even_cuts(start, end, 4) for start, end in slice_bounds(ROSTER, 103)]
    assert [cut for each in cuts for cut in each[:-1]] + [103] == sorted({cut for each in cuts for cut in each})
    assert cuts[0][0] == 0
