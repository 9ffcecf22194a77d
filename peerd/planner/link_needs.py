"""What the peers of a stage send each other, and what their lines need for it, before anybody serves it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from peerd.config.codec import parse_allowed, parse_averaged
from peerd.config.manifest import Manifest
from peerd.planner.workload import Load, StageEstimate, averaged_bytes
from peerd.policy.round.needs import StageNeed as StageNeed
from peerd.policy.round.needs import StageTraffic, stage_need, within_s

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


def planned_needs(manifest: Manifest, stages: Sequence[StageEstimate], flops: float) -> list[StageNeed]:
    """What each stage's peers need, where the fewest that average serve each, with devices of `flops` operations per second."""
    microbatches_per_s = flops / max(1, *(stage.flops_per_token * manifest.tokens_per_microbatch for stage in stages))
    train = manifest.train
    samples_per_s = FEWEST_PEERS * microbatches_per_s * train.microbatch_size
    round_s = within_s(manifest.swarm.announce_period_s, train.microbatches_per_step * train.microbatch_size, [samples_per_s])
    traffics = [stage_traffic(manifest, stage.load, stage.layers) for stage in stages]
    return [stage_need(traffic, FEWEST_PEERS, round_s, microbatches_per_s) for traffic in traffics]
