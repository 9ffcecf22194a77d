"""Receipts of real microbatches: both ends sign and keep them, and a mate can compute from them what a peer did. Rule 20 (audit)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import torch

from peerd.config.codec import NONE
from peerd.config.manifest import Manifest, SwarmConfig
from peerd.errors import BadMessageError
from peerd.policy.step.receipts import NOTHING, Receipt, ShownTensors, SignedPass, ledger_name, why_not_judged
from peerd.stage.replaying import ToldPass, replay_pass, sent_alike
from peerd.stage.witnessing import KeptPass, most_kept_bytes
from peerd.wire.messages import Call, CallResult
from peerd.wire.receipts import pair_from, pair_to, tensor_hash
from tests.stage.signed_life import PLENTY, RUN, SignedLife
from tests.tiny_run import tiny_manifest

CPU = torch.device("cpu")


def audited(num_stages: int = 3, **train: Any) -> Manifest:
    return replace(tiny_manifest(num_stages, **train), swarm=SwarmConfig(trust="audits", group_size=0))


def lived(act: Callable[[SignedLife], Coroutine[Any, Any, None]], manifest: Manifest | None = None) -> None:
    async def run() -> None:
        life = SignedLife(manifest or audited(), CPU)
        await act(life)
        await life.close()

    asyncio.run(run())


def kept_by_caller(life: SignedLife, stage: int, step: int) -> list[KeptPass]:
    """What the peer of the stage before keeps of its calls to a stage."""
    witness, caller = life.witnesses[stage - 1], life.keys[stage - 1].peer
    found = (witness.kept.find(each.own.signed(RUN)) for each in witness.kept.asked_by(caller, stage, step))
    return [each for each in found if each is not None]


def test_both_ends_keep_a_signed_microbatch_and_it_can_be_computed_again_once_the_step_is_over() -> None:
    async def act(life: SignedLife) -> None:
        lineages = [witness.lineage_at(0) for witness in life.witnesses]
        await life.train(1)
        for stage, state in enumerate(life.states):
            passes = kept_by_caller(life, stage, 0)
            assert sorted(each.signed.own.asked.index for each in passes) == [0, 1, 2]
            for kept in passes:
                signed = pair_from(pair_to(kept.signed))
                assert signed == kept.signed
                assert signed.why_unsigned(RUN, life.keys[0].has_signed) == ""
                callee = life.witnesses[stage].kept.find(signed.own.signed(RUN))
                assert callee is not None
                assert tensor_hash(callee.inputs) == tensor_hash(kept.inputs)
                below = None if signed.below is None else life.witnesses[stage + 1].kept.find(signed.below.signed(RUN))
                output, output_gradient = (None, None) if below is None else (below.inputs, below.gradient)
                shown = ShownTensors(*map(tensor_hash, (kept.inputs, kept.labels, output_gradient)))
                assert why_not_judged(signed.own, signed.below, shown, lineages[stage], RUN) == ""
                index = signed.own.asked.index
                got = ToldPass(step=0, index=index, inputs=kept.inputs, labels=kept.labels, output_gradient=output_gradient)
                found = replay_pass(state, got)
                own = [None if each is None else sent_alike(each, NONE) for each in (found.output, found.gradient)]
                assert tuple(map(tensor_hash, own)) == signed.gave == (tensor_hash(output), tensor_hash(kept.gradient))

    lived(act)


def test_what_is_kept_ends_with_the_next_step_and_a_reload_makes_the_lineage_unknown() -> None:
    async def act(life: SignedLife) -> None:
        await life.train(2)
        assert len(kept_by_caller(life, 1, 0)) == 3
        await life.microbatch(2, 0)
        assert kept_by_caller(life, 1, 0) == []
        assert len(kept_by_caller(life, 1, 1)) == 3
        assert life.witnesses[1].lineage_at(1) != NOTHING
        life.load(1, life.own(1))
        assert life.witnesses[1].lineage_at(1) == NOTHING
        assert life.witnesses[1].lineage_at(2) != NOTHING

    lived(act)


def test_what_does_not_fit_is_not_kept_and_is_counted() -> None:
    manifest = audited()
    assert most_kept_bytes(manifest, PLENTY) == 2 * 3 * 4 * manifest.boundary_bytes
    assert most_kept_bytes(manifest, 4000) == 1000

    async def act(life: SignedLife) -> None:
        kept = life.witnesses[0].kept
        kept.most_bytes = manifest.boundary_bytes
        await life.train(1)
        assert kept.num_bytes <= kept.most_bytes
        assert 0 < kept.num_kept < kept.num_offered == 6

    lived(act, manifest)


def test_a_callee_signs_to_which_of_its_ledgers_it_has_added_a_microbatch_and_that_it_has_not_added_it_again() -> None:
    async def act(life: SignedLife) -> None:
        await life.microbatch(0, 0)
        await life.microbatch(0, 0)
        for stage in range(2):
            record = life.states[stage].record
            signed = [each.signed.own.answered.ledger for each in kept_by_caller(life, stage, 0)]
            assert signed == [ledger_name(record.incarnation, record.ledger_no), NOTHING], stage

    lived(act)


def unsigned(_call: Call, result: CallResult) -> CallResult:
    return replace(result, signed=None)


def of_another_call(_call: Call, result: CallResult) -> CallResult:
    assert result.signed is not None
    own = result.signed.own
    return replace(result, signed=replace(result.signed, own=replace(own, asked=replace(own.asked, index=own.asked.index + 1))))


def forged(_call: Call, result: CallResult) -> CallResult:
    assert result.signed is not None
    return replace(result, signed=replace(result.signed, own=replace(result.signed.own, callee_signature=b"no")))


def without_the_next_stages(_call: Call, result: CallResult) -> CallResult:
    assert result.signed is not None
    return replace(result, signed=replace(result.signed, below=None))


def another_gradient(call: Call, result: CallResult) -> CallResult:
    return replace(result, gradient=call.inputs)


@pytest.mark.parametrize("falsify", [unsigned, of_another_call, forged, without_the_next_stages, another_gradient])
def test_a_reply_that_binds_its_peer_to_something_else_is_refused(falsify: Callable[[Call, CallResult], CallResult]) -> None:
    async def act(life: SignedLife) -> None:
        life.falsify = lambda call, result: falsify(call, result) if call.stage == 1 else result
        with pytest.raises(BadMessageError, match="receipt"):
            await life.microbatch(0, 0)

    lived(act)


@pytest.mark.parametrize("what", ["no next stage", "another microbatch", "nothing given back"])
def test_a_reply_by_which_nobody_could_compute_the_work_again_is_refused(what: str) -> None:
    """The peer has signed it, and all signatures fit. It would take part in averages, and no audit of it could be made."""

    async def act(life: SignedLife) -> None:
        _, middle, last, _ = life.keys

        def below_of(given: Receipt) -> Receipt | None:
            asked, answered = given.asked, given.answered
            if what == "no next stage":
                return None
            if what == "another microbatch":
                asked = replace(asked, index=asked.index + 1)
            else:
                answered = replace(answered, gradient=NOTHING)
            return Receipt(asked, answered, middle.sign(asked.text(RUN)), last.sign(answered.text(asked, RUN)))

        def falsify(call: Call, result: CallResult) -> CallResult:
            signed = result.signed
            if call.stage != 1 or signed is None or signed.below is None:
                return result
            below = below_of(signed.below)
            answered = replace(signed.own.answered, below=NOTHING if below is None else below.signed(RUN))
            own = replace(signed.own, answered=answered, callee_signature=middle.sign(answered.text(signed.own.asked, RUN)))
            assert SignedPass(own, below).why_unsigned(RUN, middle.has_signed) == ""
            return replace(result, signed=SignedPass(own, below))

        life.falsify = falsify
        with pytest.raises(BadMessageError, match="receipt"):
            await life.microbatch(0, 0)

    lived(act)


def test_a_call_that_its_caller_has_not_signed_is_refused() -> None:
    async def act(life: SignedLife) -> None:
        call = life.call(0, 0)

        async def receive() -> Any:
            return (*call.inputs.chunks, *call.labels.chunks)

        bare = replace(call, inputs=call.inputs.with_chunks(()), labels=call.labels.with_chunks(()), signature=b"no")
        with pytest.raises(BadMessageError, match="not signed"):
            await life.services[0].backpropagate(life.keys[-1].peer, bare, receive, lambda _stage, _peer: None)

    lived(act)
