"""Rule N1 (norm): the gradient norm of a whole step. Every stage clips its gradients by the same norm, or leaves the step out.

A stage's own norm is a function of its average and stands in its AVERAGED peers' records. A peer that has finished the step
publishes the whole model's norm for the next few steps, so that peers that are behind apply the same value.
A norm costs no extra wait, because it appears in the same record as the average. The exception is a tied weight (tied.py):
it counts in the first stage's norm, which is known only with both stages' gradients of the weight.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from statistics import median_low

from peerd.policy.step.roster import lineage_after
from peerd.policy.step.tied import sum_told
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


def norm_by_most(mine: PeerRecord, live: LiveView, num_stages: int, is_late: bool = False) -> float | None:
    """The same in a run that certifies its averages: no single peer's word decides while more than two thirds of each stage are honest.

    Each peer that has finished the step has a word, and what the averages of all stages make has one, which decides where words are equally
    many. Where too few have told their stage's norm, what these make bears out others' words alone. `is_late`: members that lack the
    average are waited for no more.
    """
    ahead = [r for r in live.records if r.phase is not Phase.JOINING and r.step > mine.step]
    words = Counter(norm for r in ahead if (norm := told_by(r, mine.step)) is not None and not _contradicts_itself(r, norm, mine))
    made = _made_by_most(mine, live, num_stages, is_late)
    if made is None:
        made = _made_by_most(mine, live, num_stages, is_late=True)
        made = made if made in words else None
    if made is not None:
        words[made] += 1
    likely = [norm for norm, number in words.items() if number == max(words.values())]
    return made if made in likely else min(likely, default=None)


def _made_by_most(mine: PeerRecord, live: LiveView, num_stages: int, is_late: bool) -> float | None:
    """What the averages of all stages make; None while that of one is not known."""
    norms = [mine.gradient_norm if s == mine.stage else _norm_by_most_of(live, s, mine.step, is_late) for s in range(num_stages)]
    known = [norm for norm in norms if norm is not None]
    return combine(known) if len(known) == num_stages else None


def _contradicts_itself(mate: PeerRecord, norm: float, mine: PeerRecord) -> bool:
    """Whether a mate that has just applied this peer's average tells another norm than the one that its lineage has."""
    if (mate.stage, mate.step) != (mine.stage, mine.step + 1) or mine.phase is not Phase.AVERAGED:
        return False
    return mate.lineage != lineage_after(mine.lineage, mine.average_id, norm, sum_told(mate, mine.step))


def _norm_by_most_of(live: LiveView, stage: int, step: int, is_late: bool) -> float | None:
    """The norm of the average that most members of another stage hold, as they tell it; None while a third of the stage could be wrong.

    The one that more than a third of the stage's peers tell, those that have gone on among them. Devices may differ in its last digits: so
    once more than two thirds have told one, or nobody else is waited for, it is the middle one.
    """
    averaged = [m for m in live.members(stage, step) if m.phase is Phase.AVERAGED and m.gradient_norm is not None]
    held = Counter(m.average_id for m in averaged)
    if not averaged:
        return None
    average_id = min(held, key=lambda each: (-held[each], each))
    told = [m.gradient_norm for m in averaged if m.average_id == average_id and m.gradient_norm is not None]
    third = (len(live.members(stage, step)) + sum(m.step > step for m in live.serving(stage))) // 3
    norm, number = Counter(sorted(told)).most_common(1)[0]
    if number > third:
        return norm
    return median_low(told) if is_late or len(told) > 2 * third else None


def _norm_of_stage(mine: PeerRecord, live: LiveView, stage: int) -> float | None:
    if stage == mine.stage:
        return mine.gradient_norm
    averaged = [m for m in live.members(stage, mine.step) if m.phase is Phase.AVERAGED and m.gradient_norm is not None]
    return min(averaged, key=lambda m: (m.lineage, m.average_id)).gradient_norm if averaged else None
