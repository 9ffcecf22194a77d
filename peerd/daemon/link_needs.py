"""Which line a peer of a running swarm needs, and whether one suffices: from the manifest, and from what the table says of the stages."""

from __future__ import annotations

import math

from peerd.config.manifest import Manifest
from peerd.link.links import HOME_BYTES_PER_S
from peerd.models.stages import stage_traffics
from peerd.policy.round.debts import LEAST_OF_ASSUMED
from peerd.policy.round.needs import StageNeed, rounds_s, stage_need, too_slow, within_s
from peerd.policy.round.proposing import SLOWDOWN
from peerd.table.record import PeerRecord
from peerd.table.view import LiveView


def needs(manifest: Manifest, live: LiveView, num_joining: int = 0) -> tuple[StageNeed, ...]:
    """By stage: what a peer needs there once so many more have joined it; nothing, as long as some stage has not computed anything."""
    train, traffics = manifest.train, stage_traffics(manifest)
    peers = [live.num_serving(stage) for stage in range(train.num_stages)]
    rates = [_rate(live, stage) for stage in range(train.num_stages)]
    num_samples = train.microbatches_per_step * train.microbatch_size
    round_s = within_s(manifest.swarm.announce_period_s, num_samples, rates) if all(rates) else math.inf
    each = [rate / train.microbatch_size / max(1, number) for rate, number in zip(rates, peers, strict=True)]
    return tuple(stage_need(traffic, peers[k] + num_joining, round_s, each[k]) for k, traffic in enumerate(traffics))


def longest_round_s(manifest: Manifest, live: LiveView) -> float:
    """How long the longest round of the run takes, by what the peers that are known say of their lines; a home's where they say nothing."""
    rates = [
        [min(record.up or HOME_BYTES_PER_S, record.down or HOME_BYTES_PER_S) for record in live.serving(stage)]
        for stage in range(manifest.train.num_stages)
    ]
    sizes = [traffic.gradient_bytes for traffic in stage_traffics(manifest)]
    return rounds_s(sizes, rates, LEAST_OF_ASSUMED / SLOWDOWN * HOME_BYTES_PER_S)


def _rate(live: LiveView, stage: int) -> float:
    """Samples per second of all peers of a stage."""
    told = live.summary(stage)
    return told.throughput if told is not None else sum(record.throughput for record in live.serving(stage))


def slow_mates(manifest: Manifest, live: LiveView, stage: int, num_told: int = 3) -> list[str]:
    """Other peers of a stage for whose lines its averages wait, the slowest first, each with why."""
    needed = needs(manifest, live)[stage]
    slow = sorted((min(record.up, record.down), record.peer, too_slow(record.up, record.down, needed)) for record in live.serving(stage))
    return [f"{peer}: {why}" for _, peer, why in slow if why and peer != live.me][:num_told]


def why_unaveraged(manifest: Manifest, live: LiveView, record: PeerRecord) -> str:
    """Why averages leave a peer out, as far as its line is the reason; else empty."""
    return too_slow(record.up, record.down, needs(manifest, live)[record.stage])
