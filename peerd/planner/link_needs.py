"""What the peers of a stage send each other, and what their lines need for it, before anybody serves it."""

from __future__ import annotations

import math

from peerd.config.codec import parse_allowed, parse_averaged
from peerd.config.manifest import Manifest
from peerd.planner.workload import Load, StageEstimate, averaged_bytes
from peerd.policy.round.needs import StageNeed, StageTraffic, stage_need, within_s

FEWEST_PEERS = 2
"""Of a stage in which anything is averaged."""


def stage_traffic(manifest: Manifest, load: Load, layers: range) -> StageTraffic:
    """The bytes of a stage that holds these layers; of its load only the parameters count."""
    wire, last = manifest.wire, manifest.model.num_layers
    forth, back = (parse_allowed(name).codecs[-1] for name in (wire.activations, wire.activation_gradients))
    before = math.prod(manifest.boundary_shape(layers.start)) if layers.start else 0
    after = math.prod(manifest.boundary_shape(layers.stop)) if layers.stop < last else 0
    return StageTraffic(
        gradient_bytes=averaged_bytes(manifest, load, parse_averaged(wire.weight_gradients).codecs[-1]),
        boundary_up=forth.num_bytes(after) + back.num_bytes(before),
        boundary_down=forth.num_bytes(before) + back.num_bytes(after),
    )


def planned_need(manifest: Manifest, estimate: StageEstimate, flops: float, slowest_flops_per_token: int) -> StageNeed:
    """What the lines of a stage need in which the fewest devices that average do, each of `flops` operations per second.

    `slowest_flops_per_token`: of the stage that computes most.
    """
    tokens_per_s = flops / max(slowest_flops_per_token, 1)
    samples_per_s = FEWEST_PEERS * tokens_per_s * manifest.train.microbatch_size / manifest.tokens_per_microbatch
    num_samples = manifest.train.microbatches_per_step * manifest.train.microbatch_size
    round_s = within_s(manifest.swarm.announce_period_s, num_samples, [samples_per_s])
    traffic = stage_traffic(manifest, estimate.load, estimate.layers)
    return stage_need(traffic, FEWEST_PEERS, round_s, tokens_per_s / manifest.tokens_per_microbatch)
