"""What an audit of a microbatch gets, in each stage: what the mate got; what it gave only where the result here has another hash."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from peerd.audit.replays import AuditedStep, Replays
from peerd.config.codec import parse_codec
from peerd.config.manifest import Manifest, SwarmConfig
from peerd.errors import BadMessageError, WrongStateError
from peerd.policy.step.auditing import AuditWord
from peerd.policy.step.receipts import NOTHING, AnsweredPass, SignedPass
from peerd.stage.executor import Priority
from peerd.stage.witnessing import KeptPass, PassWitness
from peerd.table.record import PeerId
from peerd.wire.audit_client import AuditClient, KeptTensors
from peerd.wire.audit_service import NO_BYTES, WantedBytes
from peerd.wire.messages import TensorBytes
from peerd.wire.receipts import tensor_hash
from peerd.wire.tensors import encode
from tests.audit.audited_stage import wanted_of
from tests.stage.signed_life import PLENTY, RUN, Key, SignedLife
from tests.tiny_run import tiny_manifest

CPU = torch.device("cpu")
STAGES = [0, 1, 2]
NEEDED = {0: WantedBytes.INPUTS, 1: WantedBytes.INPUTS | WantedBytes.GRADIENT, 2: WantedBytes.INPUTS | WantedBytes.LABELS}
"""What a microbatch's replay needs of both calls together: of a first stage, tokens alone."""


class Audit:
    """Audits the one microbatch of a run of three stages, with its own copy of the stage's parameters. It is a peer of no stage."""

    def __init__(self, life: SignedLife, stage: int) -> None:
        self.life, self.stage, self.key = life, stage, Key()
        self.run, self.me, self.patience_s, self.has_signed = RUN, self.key.peer, 1.0, self.key.has_signed
        self.fetched = Counter[WantedBytes]()
        self.asked = list[PeerId]()
        self.withhold = dict[PeerId, WantedBytes]()
        """Peers that give none of these bytes."""
        self.tell: Callable[[KeptTensors], KeptTensors] = lambda kept: kept
        """What a peer makes of what it tells."""
        state, witness = life.states[stage], PassWitness(life.states[stage], self.key, PLENTY)
        self.replays = Replays(life.manifest, state, life.executors[stage], witness, cast(AuditClient, self), cast(Any, self))
        self.finished = AuditedStep(0, cast(Any, None), life.witnesses[stage].lineage_at(0), state.holdings.generation)

    @property
    def signed(self) -> SignedPass:
        [found] = self.life.witnesses[self.stage - 1].kept.asked_by(self.life.keys[self.stage - 1].peer, self.stage, 0)
        return found

    @property
    def mate(self) -> PeerId:
        return self.life.keys[self.stage].peer

    async def get_pass(self, peer: PeerId, step: int, signed: bytes, wanted: WantedBytes, patience_s: float) -> KeptTensors:
        self.asked.append(peer)
        witness = next(each for key, each in zip(self.life.keys, self.life.witnesses, strict=True) if key.peer == peer)
        kept = witness.find(signed)
        if kept is None or self.withhold.get(peer, NO_BYTES) & wanted:
            raise WrongStateError("not kept")
        return self.tell(wanted_of(kept, wanted, self.fetched))

    async def word(self) -> AuditWord:
        told = await self.replays.told(self.signed, self.finished)
        return await self.replays.measure(told, self.finished, Priority.IDLE)

    def is_off_by(self, factor: float) -> None:
        """From now on this peer's parameters are others, so its results are."""
        chance = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in self.life.states[self.stage].holdings.module.parameters():
                parameter.mul_(1 + factor * torch.randn(parameter.shape, generator=chance))

    def kept(self, call: Any) -> tuple[TensorBytes, TensorBytes, TensorBytes | None]:
        found = next(each for each in (witness.kept.find(call.signed(RUN)) for witness in self.life.witnesses) if each is not None)
        return found.inputs, found.labels, found.gradient


def audited(stage: int, act: Callable[[Audit], Coroutine[Any, Any, None]], **wire: Any) -> None:
    async def run() -> None:
        life = SignedLife(manifest_of(**wire), CPU)
        await life.microbatch(0, 0)
        await act(Audit(life, stage))
        await life.close()

    asyncio.run(run())


def manifest_of(**wire: Any) -> Manifest:
    manifest = tiny_manifest(3)
    return replace(manifest, swarm=SwarmConfig(trust="audits", group_size=0), wire=replace(manifest.wire, **wire))


def num_bytes(audit: Audit, which: WantedBytes) -> int:
    """How many bytes of a microbatch a peer of the stage has got, of these tensors."""
    own = audit.kept(audit.signed.own)
    back = audit.kept(audit.signed.below)[2] if audit.signed.below is not None else None
    found = {WantedBytes.INPUTS: own[0], WantedBytes.LABELS: own[1], WantedBytes.GRADIENT: back}[which]
    return 0 if found is None else found.num_bytes


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_an_honest_mate_costs_the_bytes_that_it_got(stage: int, codec: str) -> None:
    async def act(audit: Audit) -> None:
        assert (await audit.word()).deviation == 0.0
        assert stage == 0 or str(audit.kept(audit.signed.own)[0].codec) == codec
        assert +audit.fetched == {which: num_bytes(audit, which) for which in NEEDED[stage]}
        assert audit.mate not in audit.asked

    audited(stage, act, activations=codec, activation_gradients=codec)


@pytest.mark.parametrize("stage", STAGES)
def test_a_part_costs_the_gradient_of_the_output_too_and_nothing_that_the_mate_gave(stage: int) -> None:
    async def act(audit: Audit) -> None:
        _, _, told = await audit.replays._told_pass(audit.signed, audit.finished, needs_back=True)
        needed = NEEDED[stage] | (NO_BYTES if stage == 2 else WantedBytes.GRADIENT)
        assert +audit.fetched == {which: num_bytes(audit, which) for which in needed}
        below = audit.signed.below
        assert tensor_hash(told.output_gradient) == (NOTHING if below is None else below.answered.gradient)

    audited(stage, act)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize(("factor", "is_wrong"), [(1e-7, False), (1.0, True)])
def test_where_the_hash_differs_the_bytes_decide(stage: int, codec: str, factor: float, is_wrong: bool) -> None:
    async def act(audit: Audit) -> None:
        audit.is_off_by(factor)
        word = await audit.word()
        assert (word.differs, word.accuses) == (is_wrong, is_wrong)
        assert audit.mate not in audit.asked, "the other ends have kept what it gave"
        expected = Counter({which: num_bytes(audit, which) for which in NEEDED[stage]})
        if stage < 2:
            expected[WantedBytes.INPUTS] += audit.kept(audit.signed.below)[0].num_bytes
        if stage > 0:
            gradient = audit.kept(audit.signed.own)[2]
            assert gradient is not None
            expected[WantedBytes.GRADIENT] += gradient.num_bytes
        fetched = +audit.fetched
        assert fetched <= expected, "where a codec loses enough, the hashes are still equal"
        assert fetched == expected or not is_wrong

    audited(stage, act, activations=codec, activation_gradients=codec)


@pytest.mark.parametrize("stage", STAGES)
def test_what_the_other_ends_withhold_comes_from_the_mate_and_without_that_nobody_is_judged(stage: int) -> None:
    async def act(audit: Audit) -> None:
        audit.is_off_by(1.0)
        told = await audit.replays.told(audit.signed, audit.finished)
        keys = audit.life.keys
        audit.withhold = {keys[stage - 1].peer: WantedBytes.GRADIENT} | ({keys[stage + 1].peer: WantedBytes.INPUTS} if stage < 2 else {})
        assert (await audit.replays.measure(told, audit.finished, Priority.IDLE)).accuses
        audit.withhold[audit.mate] = WantedBytes.GRADIENT | WantedBytes.INPUTS
        assert (await audit.replays.measure(told, audit.finished, Priority.IDLE)).accuses, "it has the bytes by now"
        audit.withhold[audit.mate] = NO_BYTES
        again = await audit.replays.told(audit.signed, audit.finished)
        audit.withhold[audit.mate] = WantedBytes.GRADIENT | WantedBytes.INPUTS
        with pytest.raises(WrongStateError, match="not kept"):
            await audit.replays.measure(again, audit.finished, Priority.IDLE)

    audited(stage, act)


@pytest.mark.parametrize("stage", STAGES)
def test_what_others_tell_of_a_tensor_without_its_bytes_convicts_nobody(stage: int) -> None:
    """They say that it travelled in another codec, or that there is none."""

    def false(value: TensorBytes | None) -> TensorBytes | None:
        return value if value is None or value.chunks else replace(value, codec=parse_codec("int4"))

    async def act(audit: Audit) -> None:
        audit.tell = lambda kept: (false(kept[0]) or kept[0], kept[1], false(kept[2]))
        word = await audit.word()
        assert (word.deviation, word.tolerance) == (0.0, 1e-4)
        audit.tell = lambda kept: (kept[0], kept[1], kept[2] if kept[2] is None or kept[2].chunks else None)
        assert (await audit.word()).deviation == 0.0

    audited(stage, act)


def test_inputs_that_were_not_signed_are_not_used() -> None:
    async def act(audit: Audit) -> None:
        noise = encode(torch.randn(audit.kept(audit.signed.own)[0].shape))
        audit.tell = lambda kept: (noise, kept[1], kept[2])
        with pytest.raises(WrongStateError):
            await audit.word()
        assert audit.mate in audit.asked

    audited(1, act)


def test_a_peer_of_a_middle_stage_that_names_no_next_stage_is_not_computed() -> None:
    async def act(audit: Audit) -> None:
        signed, key = audit.signed, audit.life.keys[1]
        answered = replace(signed.own.answered, below=NOTHING)
        own = replace(signed.own, answered=answered, callee_signature=key.sign(answered.text(signed.own.asked, RUN)))
        with pytest.raises(BadMessageError, match="what the next stage got"):
            await audit.replays.told(SignedPass(own), audit.finished)

    audited(1, act)


def test_a_next_stage_that_gave_nothing_back_or_something_else_is_no_reason_to_judge() -> None:
    async def act(audit: Audit) -> None:
        signed, keys = audit.signed, audit.life.keys
        assert signed.below is not None
        for gradient in (None, encode(torch.randn(3))):
            nothing = AnsweredPass(tensor_hash(gradient), NOTHING, b"")
            below = replace(signed.below, answered=nothing, callee_signature=keys[2].sign(nothing.text(signed.below.asked, RUN)))
            answered = replace(signed.own.answered, below=below.signed(RUN))
            own = replace(signed.own, answered=answered, callee_signature=keys[1].sign(answered.text(signed.own.asked, RUN)))
            for witness, call in ((audit.life.witnesses[0], own), (audit.life.witnesses[2], below)):
                inputs, labels, given = audit.kept(signed.own if call is own else signed.below)
                witness.kept.put(RUN, KeptPass(SignedPass(call), inputs, labels, given if call is own else gradient))
            with pytest.raises(BadMessageError, match=r"nothing back|is due"):
                await audit.replays.told(SignedPass(own, below), audit.finished)

    audited(1, act)
