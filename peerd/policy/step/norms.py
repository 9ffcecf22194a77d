"""Rule N1 (norm): the gradient norm of a whole step. Every stage clips its gradients by the same norm, or leaves the step out.

A stage's own norm is a function of its average and stands in its AVERAGED peers' records. A peer that has finished the step
publishes the whole model's norm for the next few steps, so that peers that are behind apply the same value.
A norm costs no extra wait, because it appears in the same record as the average. The exception is a tied weight (tied.py):
it counts in the first stage's norm, which is known only with both stages' gradients of the weight.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from peerd.table.record import PeerRecord, Phase
from peerd.table.view import LiveView

TOLD_STEPS = 4
"""Number of finished steps whose norm and tied sum a peer publishes, for mates that have the average and are about to finish the step."""
MIN_DISTANCE = 1e-6
"""Added to a norm before it divides, as torch.nn.utils.clip_grad_norm_ does."""


def combine(norms: Sequence[float]) -> float:
    """The whole model's norm from its stages' norms in order, rounded to float32; infinite if one of them is or the sum overflows."""
    total = math.hypot(*norms)
    try:
        return float(struct.unpack("<f", struct.pack("<f", total))[0])
    except OverflowError:
        return math.inf


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor by which every gradient of the step is multiplied; 1 without clipping (max_norm 0)."""
    return min(1.0, max_norm / (norm + MIN_DISTANCE)) if max_norm else 1.0


def told_by(record: PeerRecord, step: int) -> float | None:
    """The step's norm as this record publishes it; None if it does not."""
    return next((known.norm for known in record.norms if known.step == step), None)


def norm_of_step(mine: PeerRecord, live: LiveView, num_stages: int) -> float | None:
    """The whole model's norm of this peer's step; None while it cannot be known.

    Stage mates that have finished the step come first, because this peer's parameters must become theirs; then any peer that
    has finished it. If none has, the norm is computed from every stage's average, of two the one with the smaller id: rule 9 (adopt).
    """
    ahead = [record for record in live.records if record.phase is not Phase.JOINING and record.step > mine.step]
    for group in ([r for r in ahead if r.stage == mine.stage], ahead):
        told = [(r.stage, r.lineage, norm) for r in group if (norm := told_by(r, mine.step)) is not None]
        if told:
            return min(told)[2]
    norms = [_norm_of_stage(mine, live, stage) for stage in range(num_stages)]
    known = [norm for norm in norms if norm is not None]
    return combine(known) if len(known) == num_stages else None


def _norm_of_stage(mine: PeerRecord, live: LiveView, stage: int) -> float | None:
    if stage == mine.stage:
        return mine.gradient_norm
    averaged = [m for m in live.members(stage, mine.step) if m.phase is Phase.AVERAGED and m.gradient_norm is not None]
    return min(averaged, key=lambda m: (m.lineage, m.average_id)).gradient_norm if averaged else None
