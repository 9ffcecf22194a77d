"""The codec of each link's tensors if the run says `auto`: chosen by `compressing.py` from measured rates; encoding runs off the loop.

The caller decides for both directions. The callee tells it the rate at which activations arrive; the rate of gradients it measures itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from peerd.config.codec import Codec, parse_allowed
from peerd.config.manifest import Manifest
from peerd.link.traffic import Traffic
from peerd.policy.route.compressing import Choice, choose_rung, most_s, pace_s
from peerd.table.record import PeerId
from peerd.table.view import LiveView
from peerd.wire.messages import Call, TensorBytes
from peerd.wire.tensors import decode, encode

FORTH, BACK = "activations", "activation_gradients"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChoice:
    """The codec of one link in one direction, and the reason for it."""

    peer: PeerId
    tensor: str
    codec: Codec
    rate: float | None
    """Measured bytes per second; None while unknown."""
    load: float | None
    reason: str


class LinkCodecs:
    """The codecs of one daemon's links to the peers of the next stage."""

    def __init__(self, manifest: Manifest, live: Callable[[], LiveView], traffic: Traffic) -> None:
        self._allowed = {FORTH: parse_allowed(manifest.wire.activations), BACK: parse_allowed(manifest.wire.activation_gradients)}
        self._train = manifest.train
        self._live = live
        self._traffic = traffic
        self._chosen: dict[tuple[PeerId, str], tuple[Choice, float | None]] = {}

    async def adapt(self, call: Call, peer: PeerId) -> Call:
        """The call in the form in which it is sent to `peer`. An evaluation uses the most exact codec that the run allows."""
        if call.stage == 0 or call.evaluation:
            return call
        live = self._live()
        if self._allowed[BACK].is_auto:
            call = replace(call, gradient_codec=self._choose(live, peer, BACK, call.inputs.num_values))
        if self._allowed[FORTH].is_auto:
            codec = self._choose(live, peer, FORTH, call.inputs.num_values, call.labels.num_bytes)
            if codec.is_lossy:
                call = replace(call, inputs=await asyncio.to_thread(_encoded, call.inputs, codec))
        return call

    def choices(self) -> list[LinkChoice]:
        """The choices for live peers, sorted by peer and tensor."""
        there = {record.peer for record in self._live().records}
        return [
            LinkChoice(
                peer=peer, tensor=tensor, codec=self._allowed[tensor].codecs[choice.rung], rate=rate, load=choice.load, reason=choice.reason
            )
            for (peer, tensor), (choice, rate) in sorted(self._chosen.items())
            if peer in there
        ]

    def _choose(self, live: LiveView, peer: PeerId, tensor: str, num_values: int, more_bytes: int = 0) -> Codec:
        """The codec for a tensor with which `more_bytes` travel."""
        codecs, train = self._allowed[tensor].codecs, self._train
        ends = (peer, live.me) if tensor == BACK else (live.me, peer)
        rate = self._traffic.rates(peer)[tensor == BACK]
        fastest = rate if tensor == BACK else self._fastest(live)
        slowness = rate / fastest if rate and fastest else 1.0
        between_s = pace_s(live, train.num_stages, *ends, train.microbatch_size, slowness)
        longest_s = most_s(live, train.num_stages, train.microbatches_per_step * train.microbatch_size)
        known = self._chosen.get((peer, tensor))
        sizes = [codec.num_bytes(num_values) + more_bytes for codec in codecs]
        chosen = choose_rung(sizes, rate, between_s, known[0].rung if known else 0, longest_s)
        self._chosen[peer, tensor] = (chosen, rate)
        return codecs[chosen.rung]

    def _fastest(self, live: LiveView) -> float | None:
        """The fastest rate, in bytes per second, that this peer's line has shown: that to one peer of the next stage."""
        told = [self._traffic.rates(record.peer)[0] for record in live.serving(live.mine.stage + 1)] if live.mine is not None else []
        return max((rate for rate in told if rate), default=None)


def _encoded(raw: TensorBytes, codec: Codec) -> TensorBytes:
    return encode(decode(raw, _CPU), codec)
