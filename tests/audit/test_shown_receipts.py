"""What mates and callers show of a peer's part: who does not show all of it is left out and not convicted. Rule 20 (audit)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from peerd.audit.tallies import AuditOutcome
from peerd.errors import WrongStateError
from peerd.policy.step.parts import basis_of, passes_of_part
from peerd.policy.step.receipts import NOTHING, AnsweredPass, AskedPass, Receipt, SignedPass
from tests.audit.audited_stage import AuditedStage, Mate, counts, lived, num_done, until


def test_a_part_is_not_judged_where_a_microbatch_of_it_is_not_signed_or_signed_twice() -> None:
    async def act(stage: AuditedStage) -> None:
        ask, keep = stage.caller.auditor.receipts, stage.mates[0]

        def receipts(of_stage: int, step: int, known: Any) -> Any:
            convictions, pairs = ask(of_stage, step, known)
            lacks = [pair for pair in pairs if pair.own.asked.callee == stage.mates[1].me]
            twice, forged = (next(pair.own for pair in pairs if pair.own.asked.callee == each.me) for each in (keep, stage.mates[3]))
            other = replace(twice.asked, inputs=b"o" * 32)
            signatures = stage.caller.sign(other.text(keep.run)), keep.sign(twice.answered.text(other, keep.run))
            made_up = SignedPass(replace(forged, asked=replace(forged.asked, inputs=b"o" * 32)))
            double = SignedPass(Receipt(other, twice.answered, *signatures))
            return convictions, [*(pair for pair in pairs if pair not in lacks), double, made_up]

        stage.caller.auditor.receipts = receipts  # type: ignore[method-assign, assignment]
        stage.mates[1].auditor.receipts = lambda *_: ([], [])  # type: ignore[method-assign]
        await stage.step()
        auditor = stage.mates[2].auditor
        await until(lambda: num_done(stage.mates[2]) == 8)  # what nobody has signed is no item
        reasons = {
            note.item.audited: note.reason
            for note in auditor.tallies.last
            if note.outcome is AuditOutcome.MISSED and note.item.index is None
        }
        assert reasons == dict.fromkeys((keep.me, stage.mates[1].me), "not all of its microbatches are signed, or one twice")
        assert all(each.cases.losers == frozenset() for each in stage.mates)

    lived(act)


def test_receipts_that_the_callers_do_not_show_come_from_the_mate_itself() -> None:
    async def act(stage: AuditedStage) -> None:
        stage.caller.auditor.receipts = lambda *_: ([], [])  # type: ignore[method-assign]
        for step in (1, 2):
            await stage.step()
            await until(lambda step=step: all(num_done(each) == 3 * step for each in stage.mates))  # type: ignore[misc]
        assert all(counts(each) == {AuditOutcome.RIGHT: 6} for each in stage.mates)

    lived(act)


def test_a_caller_that_hangs_up_leaves_no_ledger_without_receipts() -> None:
    async def act(stage: AuditedStage) -> None:
        await stage.step()
        await until(lambda: all(num_done(each) == 3 for each in stage.mates))
        assert all(counts(each) == {AuditOutcome.RIGHT: 3} for each in stage.mates)

    lived(act, hangs_up=True)


@pytest.mark.parametrize("has_its_ledger", [False, True])
def test_a_mate_that_does_not_show_what_its_part_is_made_of_is_left_out_by_all_and_not_convicted(has_its_ledger: bool) -> None:
    """It signs another ledger in its receipts, or does not give them; and then it may put anything into the average."""

    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        if has_its_ledger:
            liar.auditor.receipts = lambda *_: ([], [])  # type: ignore[method-assign]
            stage.caller.auditor.receipts = lambda *_: ([], [])  # type: ignore[method-assign]
        else:
            liar.ledger = b"another."
        for step in (1, 2):
            assert all(each.cases.withholding.left_out(step) == () for each in honest)
            await stage.step()
            await until(lambda step=step: all(counts(each).get(AuditOutcome.WITHHELD) == step for each in honest))  # type: ignore[misc]
        for each in honest:
            assert [step for step in range(20) if each.cases.withholding.left_out(step)] == [*range(11)]
            assert each.cases.withholding.left_out(2) == (liar.me,)
            assert each.cases.losers == frozenset()
        assert AuditOutcome.WITHHELD not in counts(liar)

    lived(act, part_factors=[1000.0])


async def left_out_after_two_steps(stage: AuditedStage, liar: Mate, honest: Sequence[Mate]) -> None:
    """All leave a mate out that shows nothing in two steps, and nobody convicts it."""
    for step in (1, 2):
        await stage.step()
        await until(lambda step=step: all(counts(each).get(AuditOutcome.WITHHELD) == step for each in honest))  # type: ignore[misc]
    for each in honest:
        assert each.cases.withholding.left_out(2) == (liar.me,)
        assert each.cases.losers == frozenset()


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("lineage", [b"l" * 32, NOTHING])
def test_hole_84_a_mate_that_signs_other_parameters_than_those_of_the_step_has_shown_nothing(lineage: bytes, adds: bool) -> None:
    """Nobody can compute again what was computed with other parameters, so its work was never judged, whatever it was."""

    async def act(stage: AuditedStage) -> None:
        liar, *honest = stage.mates
        liar.lineage, liar.ledger = lineage, None if adds else NOTHING
        await left_out_after_two_steps(stage, liar, honest)
        assert AuditOutcome.WITHHELD not in counts(liar)

    lived(act, factors=[100.0])


def test_a_mate_whose_receipts_name_what_nobody_can_compute_has_shown_nothing() -> None:
    """It signs that a stage after the last one got its output, and its caller is an accomplice. So it is left out, and not convicted."""

    async def act(stage: AuditedStage) -> None:
        (liar, *honest), ghost = stage.mates, stage.bystander()
        true_answers = liar.answers

        async def answers(given: Any, result: Any, _below: Any) -> Any:
            asked = AskedPass(2, given.ask.asked.step, given.ask.asked.index, liar.me, ghost.me, b"i" * 32, b"l" * 32)
            answered = AnsweredPass(b"g" * 32, NOTHING, b"p" * 32)
            signatures = liar.sign(asked.text(liar.run)), ghost.sign(answered.text(asked, liar.run))
            return await true_answers(given, result, SignedPass(Receipt(asked, answered, *signatures)))

        liar.answers = answers  # type: ignore[assignment]
        stage.caller.witness._why_bad = lambda *_: ""  # type: ignore[method-assign]
        await left_out_after_two_steps(stage, liar, honest)

    lived(act, part_factors=[1000.0])


def test_a_peer_that_was_shown_other_receipts_than_the_accuser_does_not_judge_the_part() -> None:
    """Two accomplices of neighbouring stages may show some mates one receipt of a microbatch, and others another one."""

    async def act(stage: AuditedStage) -> None:
        await stage.step()
        await until(lambda: all(num_done(each) == 9 for each in stage.mates))
        judge, other = stage.mates[0].auditor, stage.mates[1].me
        finished = judge._finished[0]
        [part] = [each for each in judge._witness.parts.of(finished.roster.average_id) if each.author == other]
        pairs = await judge._receipts_of(finished)
        basis = basis_of(passes_of_part(finished.roster, other, pairs, finished.lineage), judge._host.run)
        assert len((await judge._replays.told_part(replace(part, basis=basis), pairs, finished, judge._host.me)).passes) == 2
        with pytest.raises(WrongStateError, match="other receipts"):
            await judge._replays.told_part(replace(part, basis=b"b" * 32), pairs, finished, judge._host.me)

    lived(act)
