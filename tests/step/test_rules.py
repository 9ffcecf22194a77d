"""The numbers of the step rules that follow from the run."""

from __future__ import annotations

import math

from peerd.models.stages import initial_parameter_spec, largest_state_bytes
from peerd.step.stepper import rules_of
from tests.tiny_run import tiny_manifest


def test_peers_that_hold_what_is_missing_have_time_to_load_their_state_before_a_step_is_given_up() -> None:
    manifest = tiny_manifest(3)
    assert rules_of(manifest, 15.0, 9.0, state_bytes=0).lost_wait_s == 45.0
    assert rules_of(manifest, 15.0, 9.0, state_bytes=8 * 10**9).lost_wait_s == 40.0 + 160.0


def test_the_largest_stage_counts() -> None:
    manifest = tiny_manifest(3)
    stages = [sum(math.prod(shape) for shape in initial_parameter_spec(manifest, stage).values()) for stage in range(3)]
    assert largest_state_bytes(manifest) == 16 * max(stages) > 16 * min(stages)
