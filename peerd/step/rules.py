"""The numbers of a run that the rules of a step need."""

from __future__ import annotations

from dataclasses import replace

from peerd.config.manifest import Manifest
from peerd.planner.load import FLOAT32_BYTES, Load
from peerd.planner.memory import optimizer_bytes, sum_bytes
from peerd.policy.step.groups import num_sections_of
from peerd.policy.step.situation import StepRules
from peerd.policy.swarm.pace import way_s
from peerd.table.view import LiveView

LEAST_LOST_S, READ_BYTES_PER_S = 40.0, 50e6
"""A peer that starts again needs so long until it serves, and the time to check and load its checkpoint from a slow disk."""
_OF_A_LAYER = Load(num_parameters=1, num_in_layers=1)
"""Nearly all parameters are in matrices of layers."""
MICROBATCHES_UNTIL_LOST = 3
"""A step in which no gradient was added for as long as this many microbatches take in all stages may be lost."""


def rules_in(live: LiveView, rules: StepRules, microbatch_size: int) -> StepRules:
    """The rules' numbers in the present swarm: where records live longer or microbatches take minutes, a step must look lost for longer."""
    ttl_s = rules.ttl_s * (live.mine.periods if live.mine is not None else 1)
    lost_after_s = max(rules.lost_after_s, MICROBATCHES_UNTIL_LOST * way_s(live, rules.num_stages, microbatch_size))
    is_usual = (ttl_s, lost_after_s) == (rules.ttl_s, rules.lost_after_s)
    return rules if is_usual else replace(rules, ttl_s=ttl_s, lost_after_s=lost_after_s)


def rules_of(manifest: Manifest, ttl_s: float, averaging_s: float, state_bytes: int) -> StepRules:
    """The numbers that the rules need, from the run's manifest and the size of its largest stage's state."""
    train = manifest.train
    return StepRules(
        num_stages=train.num_stages,
        num_microbatches=train.microbatches_per_step,
        ttl_s=ttl_s,
        averaging_s=averaging_s,
        lost_after_s=LEAST_LOST_S + state_bytes / READ_BYTES_PER_S,
        last_step=train.steps,
        shares_norms=train.shares_norms,
        ties_stages=manifest.ties_stages,
        group_size=manifest.swarm.group_size,
        num_sections=num_sections_of(manifest.swarm.group_size),
        local_batch=train.local_batch,
        local_after=train.local_steps_after,
        certifies=manifest.swarm.certifies,
        averages_in_state=(FLOAT32_BYTES + optimizer_bytes(train, _OF_A_LAYER)) // sum_bytes(train),
    )
