"""Which line a peer of a running swarm needs, and whether one suffices: from the manifest, and from what the table says of the stages."""

from __future__ import annotations

from peerd.config.manifest import Manifest
from peerd.models.stages import stage_traffics
from peerd.policy.round.needs import StageNeed, stage_need, too_slow, within_s
from peerd.table.record import PeerRecord
from peerd.table.view import LiveView


def needs(manifest: Manifest, live: LiveView, num_joining: int = 0) -> tuple[StageNeed, ...]:
    """By stage: what a peer needs there once so many more have joined it."""
    train, stages = manifest.train, range(manifest.train.num_stages)
    rates = [sum(record.throughput for record in live.serving(stage)) for stage in stages]
    measured = [rate for rate in rates if rate > 0]
    round_s = within_s(manifest.swarm.announce_period_s, train.microbatches_per_step * train.microbatch_size, measured)
    found = []
    for stage, traffic, rate in zip(stages, stage_traffics(manifest), rates, strict=True):
        num_serving = live.num_serving(stage)
        each = rate / train.microbatch_size / max(1, len(live.serving(stage)))
        found.append(stage_need(traffic, num_serving + num_joining, round_s, each))
    return tuple(found)


def why_unaveraged(manifest: Manifest, live: LiveView, record: PeerRecord) -> str:
    """Why averages leave a peer out, as far as its line is the reason; else empty."""
    return too_slow(record.up, record.down, needs(manifest, live)[record.stage])
