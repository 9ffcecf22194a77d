"""With `auto` each link's tensors travel as its own measurements say, both ways, and evaluations as exactly as may be."""

from __future__ import annotations

from dataclasses import replace

import torch

from peerd.config.codec import parse_codec
from peerd.config.manifest import Manifest, WireConfig
from peerd.link.traffic import Traffic, Way
from peerd.policy.route.compressing import FEWEST_RATES
from peerd.stage.adapting import LinkCodecs
from peerd.table.record import PeerId
from peerd.wire.codecs import through
from peerd.wire.messages import Call
from peerd.wire.tensors import decode, encode
from tests.strategies import member, view_of
from tests.tiny_run import tiny_manifest

NEAR, FAR = PeerId("near"), PeerId("far")
HIDDEN = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(1))
RAW_BYTES = HIDDEN.numel() * 4
TINY = tiny_manifest(2)
MANIFEST: Manifest = replace(
    TINY, wire=WireConfig(activations="auto", activation_gradients="auto:int8"), train=replace(TINY.train, microbatches_per_step=1000)
)


def codecs(traffic: Traffic, manifest: Manifest = MANIFEST) -> LinkCodecs:
    """Mine is stage 0, alone; two peers share stage 1. All compute 1 microbatch a second, so each link has one every 2 s."""
    samples = float(manifest.train.microbatch_size)
    me = member("me", throughput=samples)
    live = view_of(me, member(NEAR, stage=1, throughput=samples / 2), member(FAR, stage=1, throughput=samples / 2))
    return LinkCodecs(manifest, lambda: live, traffic)


def call(stage: int = 1, evaluation: bool = False) -> Call:
    labels = encode(torch.zeros(2, 16, dtype=torch.int32))
    return Call(
        call_id=bytes(16),
        stage=stage,
        step=0,
        index=0,
        accumulate=frozenset({1}),
        inputs=encode(HIDDEN),
        labels=labels,
        evaluation=evaluation,
    )


async def test_a_slow_link_is_compressed_and_a_fast_one_beside_it_is_not() -> None:
    traffic = Traffic()
    traffic.told((NEAR, Way.TUNNEL), 100.0 * RAW_BYTES)
    traffic.told((FAR, Way.TUNNEL), 0.2 * RAW_BYTES)
    for number in range(FEWEST_RATES):
        traffic.incoming[FAR, Way.TUNNEL].begin(4.0 * number)
        traffic.incoming[FAR, Way.TUNNEL].end(RAW_BYTES, 4.0 * number + 3.0)
    found = codecs(traffic)
    near, far = await found.adapt(call(), NEAR), await found.adapt(call(), FAR)
    assert near == replace(call(), gradient_codec=parse_codec("none"))
    assert (far.inputs.codec, far.gradient_codec) == (parse_codec("int8"), parse_codec("bfloat16"))
    assert torch.equal(decode(far.inputs, torch.device("cpu")), through(parse_codec("int8"), HIDDEN))
    assert [(choice.peer, choice.tensor, str(choice.codec)) for choice in found.choices()] == [
        (FAR, "activation_gradients", "bfloat16"),
        (FAR, "activations", "int8"),
        (NEAR, "activation_gradients", "none"),
        (NEAR, "activations", "none"),
    ]


async def test_tokens_evaluations_and_runs_that_name_their_codecs_are_left_alone() -> None:
    traffic = Traffic()
    traffic.told((FAR, Way.TUNNEL), 1.0)
    assert await codecs(traffic).adapt(call(stage=0), FAR) == call(stage=0)
    assert await codecs(traffic).adapt(call(evaluation=True), FAR) == call(evaluation=True)
    plain = codecs(traffic, replace(MANIFEST, wire=WireConfig(activations="int8")))
    assert await plain.adapt(call(), FAR) == call()
    assert plain.choices() == []


def test_only_a_number_that_can_be_a_rate_is_believed() -> None:
    traffic = Traffic()
    for told in (0.0, -1.0, float("nan"), float("inf")):
        traffic.told((FAR, Way.TUNNEL), told)
    assert not traffic.outgoing


async def test_a_line_that_no_link_has_shown_to_be_faster_answers_for_all_that_it_sends() -> None:
    """Both links are as fast as the line: what goes to one peer keeps what goes to the other waiting."""
    traffic = Traffic()
    for peer in (NEAR, FAR):
        traffic.told((peer, Way.TUNNEL), 0.5 * RAW_BYTES)
    found = codecs(traffic)
    assert [(await found.adapt(call(), peer)).inputs.codec for peer in (NEAR, FAR)] == 2 * [parse_codec("int8")]
    assert all(0.5 < (choice.load or 0) < 0.6 for choice in found.choices() if choice.tensor == "activations")


def test_what_was_measured_of_a_way_before_tensors_took_another_is_forgotten() -> None:
    traffic = Traffic()
    traffic.take(FAR, Way.TUNNEL)
    traffic.told((FAR, Way.TUNNEL), 1e9)
    traffic.take(FAR, Way.DIRECT)
    traffic.told((FAR, Way.DIRECT), 1e6)
    assert traffic.rates(FAR, Way.TUNNEL)[0] == 1e9, "compared with the direct path while that is used"
    traffic.take(FAR, Way.DIRECT)
    assert traffic.rates(FAR)[0] == 1e6
    traffic.take(FAR, Way.TUNNEL)
    assert traffic.rates(FAR) == (None, None)


async def test_each_way_to_a_peer_is_judged_by_its_own_rate() -> None:
    traffic = Traffic()
    traffic.told((NEAR, Way.TUNNEL), 100.0 * RAW_BYTES)
    traffic.told((FAR, Way.TUNNEL), 0.2 * RAW_BYTES)
    traffic.told((FAR, Way.DIRECT), 100.0 * RAW_BYTES)
    found = codecs(traffic)
    assert (await found.adapt(call(), FAR)).inputs.codec == parse_codec("int8")
    traffic.taken[FAR] = Way.DIRECT
    assert (await found.adapt(call(), FAR)).inputs.codec == parse_codec("none")
    traffic.forget(FAR)
    assert traffic.rates(FAR) == traffic.rates(FAR, Way.DIRECT) == (None, None)
