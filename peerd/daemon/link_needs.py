"""Which line a peer of a running swarm needs, and whether one suffices: from the manifest, and from what the table says of the stages."""

from __future__ import annotations

import math

from peerd.config.manifest import Manifest
from peerd.models.stages import stage_traffics
from peerd.policy.round.needs import StageNeed, stage_need, too_slow, within_s
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


def _rate(live: LiveView, stage: int) -> float:
    """Samples per second of all peers of a stage."""
    told = live.summary(stage)
    return told.throughput if told is not None else sum(record.throughput for record in live.serving(stage))


def why_unaveraged(manifest: Manifest, live: LiveView, record: PeerRecord) -> str:
    """Why averages leave a peer out, as far as its line is the reason; else empty."""
    return too_slow(record.up, record.down, needs(manifest, live)[record.stage])
