"""A chain of real stage services with codecs at its boundaries gives what the reference gives, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from peerd.config.codec import EXAMPLES, parse_codec
from peerd.config.manifest import Manifest, WireConfig
from peerd.errors import BadMessageError, PeerGoneError
from peerd.link.links import Bytes
from peerd.models.stages import build_stage
from peerd.reference import backpropagate
from peerd.stage.calls import StageService
from peerd.stage.executor import Executor, Pace
from peerd.stage.state import StageState
from peerd.table.record import PeerId, PeerRecord
from peerd.timeline.spans import SpanKind, SpanRing
from peerd.wire.messages import Call, CallResult, TensorBytes
from peerd.wire.tensors import encode
from tests.paper_host import PaperHost
from tests.strategies import view_of
from tests.tiny_run import tiny_manifest

PASSES = {SpanKind.FORWARD, SpanKind.RECOMPUTE, SpanKind.BACKWARD}
TOKENS, LABELS = torch.randint(0, 256, (2, 2, 16), generator=torch.Generator().manual_seed(3)).unbind(0)


class Chain:
    """Stage services that hand on to one another without a wire; `spoil` may change what comes back to a stage."""

    def __init__(self, manifest: Manifest) -> None:
        self.states: list[StageState] = []
        self.services: list[StageService] = []
        self.executors: list[Executor] = []
        self.distrusted: list[PeerId] = []
        self.sent: list[TensorBytes] = []
        self.spoil: Callable[[TensorBytes], TensorBytes] = lambda gradient: gradient
        for stage in range(manifest.train.num_stages):
            record = PeerRecord(peer=PeerId(f"p{stage}"), incarnation=1, stage=stage)
            state = StageState(manifest, record, torch.device("cpu"), lambda record=record: view_of(record))  # type: ignore[misc]
            state.serve()
            executor = Executor()
            self.states.append(state)
            self.executors.append(executor)
            self.services.append(StageService(manifest, state, executor, self, Pace(), PaperHost()))

    async def send(self, call: Call, on_forwarded: Callable[[int, PeerId], None]) -> CallResult:
        on_forwarded(call.stage, PeerId(f"p{call.stage}"))

        async def receive() -> tuple[Bytes, ...]:
            return (*call.inputs.chunks, *call.labels.chunks)

        without_bytes = replace(call, inputs=call.inputs.with_chunks(()), labels=call.labels.with_chunks(()))
        result = await self.services[call.stage].backpropagate(PeerId("caller"), without_bytes, receive, lambda _stage, _peer: None)
        self.sent += [call.inputs] if call.stage else []
        return result if result.gradient is None else replace(result, gradient=self.spoil(result.gradient))

    def distrust(self, call: Call, peer: PeerId) -> None:
        self.distrusted.append(peer)

    def launch(self) -> Call:
        inputs, labels, stages = encode(TOKENS.int()), encode(LABELS.int()), frozenset(range(len(self.states)))
        return Call(call_id=bytes(16), stage=0, step=0, index=0, accumulate=stages, inputs=inputs, labels=labels)


@pytest.fixture
def make_chain() -> Iterator[Callable[[WireConfig], Chain]]:
    chains: list[Chain] = []

    def make(wire: WireConfig) -> Chain:
        torch.set_num_threads(1)
        chains.append(Chain(replace(tiny_manifest(3), wire=wire)))
        return chains[-1]

    yield make
    for chain in chains:
        for executor in chain.executors:
            executor.close()


@pytest.mark.parametrize("codec", EXAMPLES)
async def test_the_chain_gives_the_references_gradients_to_the_bit(make_chain: Callable[[WireConfig], Chain], codec: str) -> None:
    wire = WireConfig(activations=codec, activation_gradients=codec)
    chain = make_chain(wire)
    await chain.send(chain.launch(), lambda _stage, _peer: None)
    stages = [build_stage(tiny_manifest(3), stage, "cpu") for stage in range(3)]
    loss = backpropagate(stages, TOKENS, LABELS, wire)
    assert float(chain.states[-1].accumulator.flat[-1]) == pytest.approx(loss, rel=1e-7)
    for state, stage in zip(chain.states, stages, strict=True):
        expected = torch.cat([parameter.grad.flatten() for parameter in stage.parameters() if parameter.grad is not None])
        assert torch.equal(state.accumulator.flat[:-1], expected)
    assert {str(tensor.codec) for tensor in chain.sent} == {codec}


@pytest.mark.parametrize("lacking", [frozenset({0}), frozenset({1}), frozenset({2}), frozenset({0, 2}), frozenset({1, 2})])
async def test_a_replay_for_some_stages_goes_back_only_as_far_as_one_of_them_and_adds_the_same(
    make_chain: Callable[[WireConfig], Chain], lacking: frozenset[int]
) -> None:
    """Where stages before lack nothing, their backward passes, two thirds of the work, would be in vain."""
    whole, part = make_chain(WireConfig()), make_chain(WireConfig())
    for state in part.states:
        state.spans = SpanRing(100)
    await whole.send(whole.launch(), lambda _stage, _peer: None)
    await part.send(replace(part.launch(), accumulate=lacking), lambda _stage, _peer: None)
    for stage, (state, expected) in enumerate(zip(part.states, whole.states, strict=True)):
        assert state.record.done == (1 if stage in lacking else 0)
        assert torch.equal(
            state.accumulator.flat, expected.accumulator.flat if stage in lacking else torch.zeros_like(state.accumulator.flat)
        )
    made = [{span.kind for span in state.spans.of_microbatch(0, 0, 0.0)} for state in part.states]
    assert [SpanKind.BACKWARD in kinds for kinds in made] == [stage >= min(lacking) for stage in range(3)]
    assert all(SpanKind.FORWARD in kinds for kinds in made)


@pytest.mark.parametrize("lacking", [0, 1])
async def test_stages_that_have_done_a_microbatch_give_its_gradient_again_until_their_parameters_change(
    make_chain: Callable[[WireConfig], Chain], lacking: int
) -> None:
    """Stage `lacking` has another peer now; the earlier ones make their forward pass, and of the later ones only the next is asked."""
    chain = make_chain(WireConfig(activation_gradients="bfloat16"))
    await chain.send(chain.launch(), lambda _stage, _peer: None)
    sums = [state.accumulator.flat.clone() for state in chain.states]
    replay = replace(chain.launch(), accumulate=frozenset({lacking}))

    async def made_anew() -> list[set[SpanKind]]:
        chain.states[lacking].drop_sums([chain.states[lacking].record.peer])
        for state in chain.states:
            state.spans = SpanRing(100)
        await chain.send(replay, lambda _stage, _peer: None)
        for state, expected in zip(chain.states, sums, strict=True):
            assert torch.equal(state.accumulator.flat, expected)
        return [{span.kind for span in state.spans.of_microbatch(0, 0, 0.0)} & PASSES for state in chain.states]

    passes = await made_anew()
    assert [bool(kinds) for kinds in passes] == [stage <= lacking for stage in range(3)]
    assert [SpanKind.BACKWARD in kinds for kinds in passes] == [stage == lacking for stage in range(3)]
    asked = chain.states[lacking + 1]
    asked.load(asked.holdings.tensors(asked.record), 0, asked.record.lineage, ())
    sums[lacking + 1].zero_()
    assert SpanKind.BACKWARD in (await made_anew())[lacking + 1]


async def test_a_gradient_in_another_codec_is_the_next_stages_fault(make_chain: Callable[[WireConfig], Chain]) -> None:
    """And none of the caller's business: the microbatch is sent elsewhere, and given up after some tries."""
    chain = make_chain(WireConfig(activation_gradients="int8"))
    chain.spoil = lambda gradient: encode(torch.zeros(gradient.shape))
    with pytest.raises(PeerGoneError):
        await chain.send(chain.launch(), lambda _stage, _peer: None)
    assert set(chain.distrusted) == {PeerId("p2")}
    assert all(state.record.done == 0 for state in chain.states[:2])


async def test_activations_that_decode_to_nothing_are_refused(make_chain: Callable[[WireConfig], Chain]) -> None:
    chain = make_chain(WireConfig(activations="topk:0.25"))
    sound = encode(torch.ones(2, 16, 32), parse_codec("topk:0.25"))
    broken = sound.with_chunks((b"\xff" * sound.num_bytes,))
    with pytest.raises(BadMessageError, match="positions"):
        await chain.send(replace(chain.launch(), stage=1, inputs=broken), lambda _stage, _peer: None)
    assert chain.services[1].queue == 0


async def test_where_links_choose_what_the_caller_asks_for_comes_back(make_chain: Callable[[WireConfig], Chain]) -> None:
    """Any codec that the run allows, for activations and for their gradients; no other."""
    chain = make_chain(WireConfig(activations="auto", activation_gradients="auto:int8"))
    sound, half = encode(torch.ones(2, 16, 32), parse_codec("topk:0.08")), parse_codec("bfloat16")
    call = replace(chain.launch(), stage=1, inputs=sound, gradient_codec=half)
    result = await chain.send(call, lambda _stage, _peer: None)
    assert result.gradient is not None
    assert result.gradient.codec == half
    assert chain.sent[0].codec == parse_codec("none"), "what comes in compressed goes on as the next link needs it"
    with pytest.raises(BadMessageError, match=r"asked for as topk:0\.08"):
        await chain.send(replace(call, gradient_codec=parse_codec("topk:0.08")), lambda _stage, _peer: None)
    with pytest.raises(BadMessageError, match=r"encoded as topk:0\.9 where auto:topk:0\.05 is due"):
        await chain.send(replace(call, inputs=encode(torch.ones(2, 16, 32), parse_codec("topk:0.9"))), lambda _stage, _peer: None)
