"""What a peer has sent on without a receipt of its own is found at the next stage, and computed again: hole 86."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from peerd.audit.replays import AuditedStep
from peerd.audit.unclaimed import UnclaimedWork
from peerd.errors import BadMessageError, ChangedLabelsError, PeerGoneError, WrongStateError
from peerd.policy.step.auditing import AuditWord
from peerd.policy.step.receipts import NOTHING, SentOn, SignedAsk, SignedPass
from peerd.stage.executor import Priority
from peerd.table.record import Lineage, PeerId
from peerd.wire.messages import Call, CallResult
from peerd.wire.receipts import sent_on_from, sent_on_to
from peerd.wire.tensors import decode, encode
from tests.audit.test_replays import CPU, Audit, manifest_of
from tests.stage.signed_life import RUN, SignedLife
from tests.strategies import member, view_of

STAGES = [0, 1]


@dataclass
class Text:
    """The run's text, as the life's trainer has it."""

    life: SignedLife

    @property
    def tokens(self) -> Text:
        return self

    def microbatch(self, step: int, index: int) -> tuple[Tensor, Tensor]:
        call = self.life.call(step, index)
        return decode(call.inputs, CPU), decode(call.labels, CPU)


def sent_by(audit: Audit) -> SentOn:
    [found] = audit.life.witnesses[audit.stage + 1].sent_on(audit.stage, 0, ())
    return sent_on_from(sent_on_to(found))


async def word_on(audit: Audit, sent: SentOn | None = None) -> AuditWord:
    told = await audit.replays.told_sent_on(sent or sent_by(audit), audit.finished)
    return await audit.replays.measure(told, audit.finished, Priority.IDLE)


def lived(stage: int, act: Callable[[Audit], Coroutine[Any, Any, None]], before: Callable[[SignedLife], None] = lambda _life: None) -> None:
    async def run() -> None:
        life = SignedLife(manifest_of(), CPU)
        before(life)
        with contextlib.suppress(BadMessageError):  # where the liar's caller gets no answer that it could use
            await life.microbatch(0, 0)
        audit = Audit(life, stage)
        audit.replays._data = Text(life)
        await act(audit)
        await life.close()

    asyncio.run(run())


def falsifies(stage: int, answers: bool) -> Callable[[SignedLife], None]:
    """The peer of this stage sends noise on, and then answers its caller or does not."""

    def change(life: SignedLife) -> None:
        send = life.send

        async def false(call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
            if call.stage == stage + 1:
                chance = torch.Generator().manual_seed(3)
                call = replace(call, inputs=encode(torch.randn(tuple(call.inputs.shape), generator=chance)))
            return await send(call, on_forwarded)

        life.falsify = lambda call, result: result if answers or call.stage != stage else replace(result, signed=None)
        life.send = false  # type: ignore[method-assign]

    return change


@pytest.mark.parametrize("stage", STAGES)
def test_the_next_stage_shows_what_an_honest_peer_has_sent_on_and_it_is_right(stage: int) -> None:
    async def act(audit: Audit) -> None:
        sent = sent_by(audit)
        assert sent.why_unsigned(RUN, audit.has_signed) == ""
        assert sent.got.asked == audit.signed.own.asked
        assert (await word_on(audit)).deviation == 0.0

    lived(stage, act)


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_hole_86_noise_that_a_peer_has_sent_on_convicts_it_though_it_never_answers_its_caller(stage: int, answers: bool) -> None:
    async def act(audit: Audit) -> None:
        found = await word_on(audit)
        assert found.accuses, found
        receipts = audit.life.witnesses[stage - 1].kept.asked_by(audit.life.keys[stage - 1].peer, stage, 0)
        assert len(receipts) == answers, "without an answer no caller has a receipt"

    lived(stage, act, falsifies(stage, answers))


def test_nobody_is_judged_by_other_inputs_or_with_other_parameters() -> None:
    async def act(audit: Audit) -> None:
        sent = sent_by(audit)
        asked = replace(sent.gave.asked, lineage=b"l" * 32)
        assert sent.why_not_judged(sent.got.asked.inputs, audit.finished.lineage) == ""
        assert "other parameters" in replace(sent, gave=replace(sent.gave, asked=asked)).why_not_judged(b"", audit.finished.lineage)
        assert "not the tensors" in sent.why_not_judged(b"o" * 32, audit.finished.lineage)
        audit.replays._data = None
        with pytest.raises(WrongStateError, match="text is not here"):
            await word_on(audit)

    lived(0, act)


@pytest.mark.parametrize("what", ["nothing", "another microbatch", "another call", "other labels", "forged"])
def test_hole_86_a_call_that_does_not_show_what_it_was_made_of_is_refused(what: str) -> None:
    def change(life: SignedLife) -> None:
        send = life.send

        async def false(call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
            if call.stage == 1 and call.above is not None:
                asked, trainer = call.above.asked, life.keys[-1]
                changed = {
                    "another microbatch": replace(asked, index=asked.index + 1),
                    "another call": replace(asked, callee=trainer.peer),
                    "other labels": replace(asked, labels=b"o" * 32),
                }.get(what, asked)
                signature = b"no" if what == "forged" else trainer.sign(changed.text(RUN))
                call = replace(call, above=None if what == "nothing" else SignedAsk(changed, signature))
            return await send(call, on_forwarded)

        life.send = false  # type: ignore[method-assign]

    async def run() -> None:
        life = SignedLife(manifest_of(), CPU)
        change(life)
        with pytest.raises(BadMessageError):
            await life.microbatch(0, 0)
        assert life.witnesses[1].sent_on(0, 0, ()) == []
        await life.close()

    asyncio.run(run())


def test_what_a_peer_sends_on_after_it_got_other_parameters_names_none() -> None:
    """Its mates could take it for a lie else."""

    def change(life: SignedLife) -> None:
        send = life.send

        async def reloaded(call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
            if call.stage == 1:
                life.load(0, replace(life.own(0), lineage=Lineage(0, b"other")))
            return await send(call, on_forwarded)

        life.send = reloaded  # type: ignore[method-assign]

    async def act(audit: Audit) -> None:
        [sent] = audit.life.witnesses[1].sent_on(0, 0, ())
        assert sent.gave.asked.lineage == NOTHING

    async def run() -> None:
        life = SignedLife(manifest_of(), CPU)
        change(life)
        with pytest.raises(WrongStateError):
            await life.microbatch(0, 0)
        await act(Audit(life, 0))
        await life.close()

    asyncio.run(run())


def test_tokens_that_a_first_stage_without_the_data_let_through_are_refused_by_the_next_one_that_has_it() -> None:
    async def run() -> None:
        life = SignedLife(manifest_of(), CPU)
        life.services[1]._jobs._data = cast(Any, Text(life))
        call = life.call(0, 0)
        await life.microbatch(0, 0)
        made_up = replace(call, index=1, call_id=bytes(16))  # the tokens of another microbatch, under the right labels
        with pytest.raises(ChangedLabelsError, match="labels"):
            await life.send(made_up, lambda _stage, _peer: None)
        with pytest.raises(ChangedLabelsError, match="tokens"):
            await life.send(replace(made_up, labels=life.call(0, 1).labels), lambda _stage, _peer: None)
        assert life.states[1].record.done == 0b1
        await life.close()

    asyncio.run(run())


class Holders:
    """Peers of the next stage, which show what they are told to; the auditor, too."""

    def __init__(self, audit: Audit) -> None:
        self.run, self.me, self.patience_s, self.has_signed = RUN, audit.me, 1.0, audit.has_signed
        self._audit, self.asked = audit, list[list[bytes]]()
        self.tell: Callable[[list[SentOn]], list[SentOn]] = lambda found: found
        self.known = True
        """Whether the audited peer is known to serve its stage."""

    def live(self) -> Any:
        keys, stage = self._audit.life.keys, self._audit.stage
        serving = (member(keys[each].peer, stage=each) for each in range(3) if self.known or each != stage)
        return view_of(member(self.me, stage=stage), *serving, member("gone", stage=stage + 1))

    async def get_sent_on(
        self, peer: PeerId, stage: int, step: int, known: Collection[bytes], most: int, patience_s: float
    ) -> Sequence[SentOn]:
        if peer == PeerId("gone"):
            raise PeerGoneError("gone")
        self.asked.append(list(known))
        return self.tell(self._audit.life.witnesses[stage + 1].sent_on(stage, step, known))

    async def of(self, shown: Sequence[SignedPass], finished: AuditedStep | None = None) -> tuple[list[SentOn], set[PeerId]]:
        work = UnclaimedWork(self._audit.life.states[self._audit.stage], cast(Any, self), cast(Any, self))
        return await work.of(finished or self._audit.finished, shown)


def test_only_what_no_receipt_shows_is_told_and_only_what_binds_its_peer_counts() -> None:
    async def act(audit: Audit) -> None:
        holders, sent = Holders(audit), sent_by(audit)
        assert await holders.of([audit.signed]) == ([], set())
        assert holders.asked == [[sent.gave.asked.name(RUN)]]
        assert await holders.of([]) == ([sent], set())
        other = replace(audit.finished, lineage=b"l" * 32)
        assert await holders.of([], other) == ([], {audit.mate})
        holders.known = False
        assert await holders.of([], other) == ([], set()), "it may be a key that the holder has made up"
        assert await holders.of([]) == ([], set())
        holders.known = True
        holders.tell = lambda found: [replace(each, got=replace(each.got, signature=b"no")) for each in found]
        assert await holders.of([]) == ([], set())
        holders.tell = lambda found: [replace(each, got=replace(each.got, asked=replace(each.got.asked, step=1))) for each in found]
        assert await holders.of([]) == ([], set())

    for stage in STAGES:
        lived(stage, act)


def test_calls_without_an_answer_are_kept_until_the_next_step_ends_as_far_as_they_fit() -> None:
    async def run() -> None:
        life = SignedLife(manifest_of(), CPU)
        trainer = life.witnesses[-1].calls
        call = life.call(0, 0)
        for step in range(4):
            signed, asked = await life.witnesses[-1].asks(replace(call, step=step), life.keys[0].peer)
            assert asked is not None
            found = life.witnesses[-1].find(asked.text(RUN))
            assert found is not None
            assert found[0] is signed.inputs
        assert trainer._num_bytes == 2 * (call.inputs.num_bytes + call.labels.num_bytes)
        trainer._most_bytes = trainer._num_bytes
        _, asked = await life.witnesses[-1].asks(replace(call, step=3, index=1), life.keys[0].peer)
        assert asked is not None
        assert life.witnesses[-1].find(asked.text(RUN)) is None
        await life.close()

    asyncio.run(run())
