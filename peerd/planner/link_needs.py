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
    (forth_before, back_before), (forth_after, back_after) = (boundary_bytes(manifest, each) for each in (layers.start, layers.stop))
    return StageTraffic(
        gradient_bytes=averaged_bytes(manifest, load, parse_averaged(manifest.wire.weight_gradients).codecs[-1]),
        boundary_up=forth_after + back_before,
        boundary_down=forth_before + back_after,
    )


def boundary_bytes(manifest: Manifest, layer: int) -> tuple[int, int]:
    """What a microbatch sends over the boundary before this layer: activations forth, gradients back. None at the model's ends."""
    if not 0 < layer < manifest.model.num_layers:
        return 0, 0
    numbers = math.prod(manifest.boundary_shape(layer))
    forth, back = (parse_allowed(name).codecs[-1] for name in (manifest.wire.activations, manifest.wire.activation_gradients))
    return forth.num_bytes(numbers), back.num_bytes(numbers)


def planned_needs(manifest: Manifest, stages: Sequence[StageEstimate], flops: float) -> list[StageNeed]:
    """What each stage's peers need, where the fewest that average serve each, with devices of `flops` operations per second."""
    microbatches_per_s = flops / max(1, *(stage.flops_per_token * manifest.tokens_per_microbatch for stage in stages))
    train = manifest.train
    samples_per_s = FEWEST_PEERS * microbatches_per_s * train.microbatch_size
    round_s = within_s(manifest.swarm.announce_period_s, train.microbatches_per_step * train.microbatch_size, [samples_per_s])
    traffics = [stage_traffic(manifest, stage.load, stage.layers) for stage in stages]
    return [stage_need(traffic, FEWEST_PEERS, round_s, microbatches_per_s) for traffic in traffics]
